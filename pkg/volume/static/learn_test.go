package static

import (
	"log/slog"
	"os"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// node is a source with devices whose identities the test makes up.
type node struct {
	*testing.T
	*Source
	dir string
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{T: t, dir: t.TempDir()}
	n.reboot()
	return n
}

func (n *node) reboot() {
	n.Helper()
	var err error
	if n.Source, err = Open(Options{Dir: n.dir, NodesDir: n.TempDir(), Log: slog.New(slog.DiscardHandler)}); err != nil {
		n.Fatal(err)
	}
}

// stages finds a device for a volume, as Attach does. It tells whether the volume counts as given to
// a guest.
func (n *node) stages(id, path string, identity mounter.Identity) bool {
	n.Helper()
	e, err := n.find(id)
	if err != nil {
		e = entry{Device: path, Volume: volume.Volume{ID: id}}
	}
	if err := n.learn(e, mounter.Device{Path: path}, identity); err != nil {
		n.Fatal(err)
	}
	if e, err = n.find(id); err != nil {
		n.Fatal(err)
	}
	return e.Volume.Facts.GivenToGuest
}

func (n *node) set(id string, facts volume.Facts) {
	n.Helper()
	if err := n.SetFacts(id, facts); err != nil {
		n.Fatal(err)
	}
}

var guests = volume.Facts{Formatted: "ext4", GivenToGuest: true}

// The fact that a guest had a disk follows the disk and its parts, until this node formats them.
func TestA06_AGuestsDiskIsOthersToo(t *testing.T) {
	disk := mounter.Identity{Kind: "serial", Value: "a"}
	part := func(start int64) mounter.Identity {
		i := disk
		i.Start, i.Length = start, 100
		return i
	}
	number := func(value, boot string) mounter.Identity {
		return mounter.Identity{Kind: "number", Value: value, Boot: boot}
	}
	t.Run("a new volume of a part, formatted here", func(t *testing.T) {
		n := newNode(t)
		n.stages("whole", "/dev/a", disk)
		n.set("whole", guests)
		if !n.stages("part", "/dev/a1", part(100)) {
			t.Error("a part of a guest's disk is nobody's")
		}
		n.set("part", volume.Facts{Formatted: "ext4"}) // it was proven blank
		for range 2 {
			if n.stages("part", "/dev/a1", part(100)) {
				t.Error("what this node made is withheld from it")
			}
			n.reboot()
		}
	})
	t.Run("a known volume on what a guest gets later", func(t *testing.T) {
		n := newNode(t)
		n.stages("part", "/dev/a1", part(100))
		n.stages("other", "/dev/b", mounter.Identity{Kind: "serial", Value: "b"})
		n.stages("whole", "/dev/a", disk)
		n.set("whole", guests)
		n.reboot()
		if !n.stages("part", "/dev/a1", part(100)) {
			t.Error("the guest wrote to the whole disk, and its part is trusted")
		}
		if n.stages("other", "/dev/b", mounter.Identity{Kind: "serial", Value: "b"}) {
			t.Error("another disk is withheld")
		}
	})
	t.Run("a part that was formatted here, of a disk that a guest gets again", func(t *testing.T) {
		n := newNode(t)
		n.stages("whole", "/dev/a", disk)
		n.set("whole", guests)
		n.stages("part", "/dev/a1", part(100))
		n.set("part", volume.Facts{Formatted: "ext4"}) // it was proven blank
		n.set("whole", guests)
		if !n.stages("part", "/dev/a1", part(100)) {
			t.Error("the guest wrote to the part again, and it is trusted")
		}
	})
	t.Run("a known volume on a disk without an identity, after a reboot", func(t *testing.T) {
		n := newNode(t)
		n.stages("had", "/dev/c", number("8:32", "one"))
		n.set("had", guests)
		n.stages("known", "/dev/b", number("8:16", "one"))
		n.set("known", volume.Facts{Formatted: "ext4"})
		if n.stages("known", "/dev/b", number("8:16", "two")) {
			t.Error("a volume that was always this node's is withheld")
		}
		if !n.stages("known", "/dev/c", number("8:32", "two")) {
			t.Error("its path leads to where the guest's disk was")
		}
	})
	t.Run("disks without an identity", func(t *testing.T) {
		n := newNode(t)
		n.stages("had", "/dev/c", number("8:32", "one"))
		n.set("had", guests)
		if n.stages("beside", "/dev/b", number("8:16", "one")) {
			t.Error("of the same boot, and another number")
		}
		if !n.stages("new", "/dev/b", number("8:16", "two")) {
			t.Error("after a reboot nothing tells the two apart")
		}
		if n.stages("serial", "/dev/c", disk) {
			t.Error("a disk with a serial number is another")
		}
	})
}

// What was done to a disk is unknown if its record is unusable. So a guest may have had it, but for a
// volume that had it before.
func TestA10_ANewVolumeOfADiskWhoseRecordIsUnusable(t *testing.T) {
	n := newNode(t)
	disk := mounter.Identity{Kind: "serial", Value: "a"}
	n.stages("known", "/dev/a", disk)
	if err := os.WriteFile(n.devicePath(keyOf(disk)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.reboot()
	if n.stages("known", "/dev/a", disk) {
		t.Error("a volume that had the disk is withheld")
	}
	if !n.stages("new", "/dev/a", disk) {
		t.Error("a new volume on the disk is trusted")
	}
}
