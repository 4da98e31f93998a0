package static

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// If this process has no descriptors left when it starts, that says nothing about the records
// of devices. So it does not start, and no record counts as unusable or is removed.
func TestWithoutDescriptorsNoRecordIsUnusable(t *testing.T) {
	n := newNode(t)
	disk := mounter.Identity{Kind: "wwid", Value: "naa.5"}
	n.stages("v", "/dev/vda", disk)
	n.set("v", volume.Facts{Formatted: "ext4"})
	key := keyOf(disk)
	for _, sub := range []string{"devices", "reads"} {
		t.Run(sub, func(t *testing.T) {
			if sub == "reads" {
				before := readRecord{Identity: disk, BootID: n.boot, Read: superblock.Read{Size: 1 << 40, Done: 1 << 39}}
				if err := errors.Join(readType.Write(n.readPath(key), before), os.Remove(n.devicePath(key))); err != nil {
					t.Fatal(err)
				}
			}
			s := &Source{boot: n.boot, log: n.log, devices: map[string]deviceRecord{}, bad: map[string]error{}}
			s.keepIn(n.dir)
			err := fmt.Errorf("nothing was loaded")
			testnode.WithoutDescriptors(t, func() { err = s.loadDevices() })
			if !errors.Is(err, linux.EMFILE) || len(s.bad) > 0 {
				t.Errorf("%v; unusable: %v", err, s.bad)
			}
			if err := s.loadDevices(); err != nil || len(s.bad) > 0 {
				t.Errorf("later: %v; unusable: %v", err, s.bad)
			}
			if _, known := s.devices[key]; known != (sub == "devices") {
				t.Errorf("the device is known: %t", known)
			}
			if sub == "reads" {
				var after readRecord
				if err := readType.Read(n.readPath(key), &after); err != nil || after.Read.Done != 1<<39 {
					t.Errorf("what was read is forgotten: %+v, %v", after, err)
				}
			}
		})
	}
}
