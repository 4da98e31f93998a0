package mounter

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// U01: an id map that no kernel takes is its caller's fault, and not this kernel's.
func TestU01_AnIDMapThatIsNoneIsInvalid(t *testing.T) {
	all := []IDRange{{0, 0, 10}}
	d := formatted(t, "ext4")
	for name, m := range map[string]IDMap{
		"no map": {}, "no groups": {UIDs: all}, "no users": {GIDs: all},
		"overlap on disk": {UIDs: []IDRange{{0, 0, 10}, {9, 20, 10}}, GIDs: all},
		"overlap shown":   {UIDs: all, GIDs: []IDRange{{20, 9, 10}, {0, 0, 10}}},
		"an empty range":  {UIDs: []IDRange{{0, 0, 0}}, GIDs: all},
		"too many":        {UIDs: []IDRange{{5, 0, allIDs}}, GIDs: all},
		"no such group":   ShowGroup(1, allIDs),
	} {
		mount, err := Open(Filesystem{Device: d, Type: "ext4"})
		check(t, err)
		if err := mount.Change(View{IDMap: &m}); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
		check(t, mount.Close())
	}
}

// Options that contradict each other are refused: sorted, as the kernel gets them, the last is not the one that was written last.
func TestOptionsThatContradictEachOther(t *testing.T) {
	for _, flags := range [][]string{{"nodiscard", "discard"}, {"barrier=1,nobarrier"}, {"subvol=a\xffb"}} {
		if o, err := ParseOptions(flags); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %s, %v", flags, o.SuperblockString(), err)
		}
	}
}

// Callers that ask of one device at a time disturb each other in nothing.
func TestHeldConcurrently(t *testing.T) {
	d := disk(t, "16M")
	d.Path = "/dev/nosuch"
	dir, errs := t.TempDir(), make(chan error, 32)
	for range cap(errs) {
		go func() {
			var err error
			for range 50 {
				if held, e := d.Held(dir); e != nil || held {
					err = e
				}
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		check(t, <-errs)
	}
}
