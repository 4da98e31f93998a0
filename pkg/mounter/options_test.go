package mounter

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

func TestParseOptions(t *testing.T) {
	for _, c := range []struct {
		flags      []string
		superblock string
		ro         bool
	}{
		{nil, "", false},
		{[]string{"defaults"}, "", false},
		{[]string{"noatime,nodev", "nosuid"}, "", false},
		{[]string{"ro", "commit=5"}, "commit=5", true},
		{[]string{"data=ordered,commit=5,ro"}, "commit=5,data=ordered", true},
		{[]string{"discard", "discard"}, "discard", false},
		{[]string{`context="system_u:object_r:container_file_t:s0:c1,c2"`}, "context=system_u:object_r:container_file_t:s0:c1,c2", false},
		{[]string{"context=system_u:object_r:container_file_t:s0:c1,c2,noatime,commit=9"}, "commit=9,context=system_u:object_r:container_file_t:s0:c1,c2", false},
	} {
		o, err := ParseOptions(c.flags)
		if err != nil || o.SuperblockString() != c.superblock || o.ReadOnly() != c.ro {
			t.Errorf("%q: %q, read-only %v, %v", c.flags, o.SuperblockString(), o.ReadOnly(), err)
		}
	}
	for _, bad := range [][]string{
		{"ro", "rw"}, {"noatime,relatime"}, {"bind"}, {"remount,ro"}, {"=x"}, {"commit="}, {"commit=5,commit=6"},
		{"ro=1"}, {"nodev=x"}, {`context="open`}, {"source=/dev/sda"}, {"loop"}, {"a\x00b"},
	} {
		if o, err := ParseOptions(bad); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q was taken: %+v, %v", bad, o, err)
		}
	}
}

func FuzzParseOptions(f *testing.F) {
	f.Add("ro,noatime,commit=5")
	f.Add(`context="a:b:c:s0:c1,c2",discard`)
	f.Fuzz(func(t *testing.T, s string) {
		o, err := ParseOptions([]string{s})
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		for _, opt := range o.Superblock {
			if opt.Key == "" || opt.Key == "ro" || opt.Key == "rw" || opt.Key == "source" || mountAttrs[opt.Key].mask != 0 {
				t.Fatalf("%q reaches the superblock", opt)
			}
		}
		if o.With("nouuid", "").With("nouuid", "").SuperblockString() != o.With("nouuid", "").SuperblockString() {
			t.Fatal("With is not stable")
		}
	})
}
