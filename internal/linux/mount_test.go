package linux

import (
	"encoding/binary"
	"testing"
)

func FuzzParseStatmount(f *testing.F) {
	b := make([]byte, 4096)
	binary.LittleEndian.PutUint64(b[8:], ^uint64(0))
	binary.LittleEndian.PutUint32(b[36:], 5)
	copy(b[512:], "opts\x00ext4\x00/\x00/dev/sda\x00")
	f.Add(b)
	f.Add(make([]byte, 512))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < statmountFixedSize {
			return // the kernel fills at least that
		}
		s := parseStatmount(b)
		for _, text := range []string{s.FSType, s.Options, s.Source} {
			if len(text) > len(b)-statmountFixedSize {
				t.Fatalf("text of %d bytes out of %d", len(text), len(b))
			}
		}
		if s.Mask&StatmountFSType == 0 && s.FSType != "" {
			t.Fatal("a type that was not told")
		}
	})
}
