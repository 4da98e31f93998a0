package mounter

import (
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
)

func FuzzMountinfo(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add(`25 1 0:22 / /a\040b ro - btrfs /dev/loop1 rw,subvol=/` + "\n")
	f.Fuzz(func(t *testing.T, text string) {
		infos, err := mountinfo.GetMountsFromReader(strings.NewReader(text), nil)
		if err != nil {
			return
		}
		for _, i := range infos {
			m := fromInfo(i)
			if m.ReadOnlySB && !m.ReadOnly {
				t.Fatal("a read-only superblock in a writable mount")
			}
			if _, ok, _ := m.Device(); ok && m.Type != "btrfs" && m.Type != "devtmpfs" && m.Major == 0 {
				t.Fatal("a device out of nowhere")
			}
		}
	})
}
