package loopdev

import (
	"errors"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// TestA12_A14_ALookOpensNoHold: a hold cannot be removed from a device while anybody has it open,
// so lookups do not open it repeatedly. The test plants a different cache entry: lookups believe
// it.
func TestA12_A14_ALookOpensNoHold(t *testing.T) {
	n := Nodes{Dir: t.TempDir()}
	d, err := n.Hold(attach(t, image(t), true))
	check(t, err)
	t.Cleanup(func() { check(t, n.Release(d)) })
	path := image(t)
	finds := func(want int) {
		t.Helper()
		found, err := n.Find(path)
		check(t, err)
		if len(found) != want {
			t.Errorf("found %v", found)
		}
	}
	finds(0)
	f, err := linux.Open(path, syscall.O_RDONLY)
	check(t, err)
	defer f.Close()
	is, err := identify(f)
	check(t, err)
	seen.Lock()
	was := seen.by[d.hold.name]
	other := was
	other.backing = is
	seen.by[d.hold.name] = other
	seen.Unlock()
	finds(1)
	seen.Lock()
	seen.by[d.hold.name] = was
	seen.Unlock()
	finds(0)
}

// TestA12_A14_HoldsAreKnownByTheirBinding: a cached name is not used for the next loop device with
// the same number.
func TestA12_A14_HoldsAreKnownByTheirBinding(t *testing.T) {
	n := Nodes{Dir: t.TempDir()}
	a, b := attach(t, image(t), true), attach(t, image(t), true)
	for i := range 20 {
		d := []Device{a, b}[i%2]
		h, err := n.Hold(d)
		check(t, err)
		now, ok, err := n.Open(d.Major, d.Minor)
		check(t, err)
		if !ok || !now.Held || now.backing != d.backing {
			t.Fatalf("a held device is seen as %+v", now)
		}
		check(t, n.Release(h)) // the next hold gets its number
	}
}

// TestA12_ADeviceThatIsGoneIsDetached: while the kernel unbinds a loop device, its node cannot be
// opened (ENXIO), as if no driver had its number. Then it counts as detached.
func TestA12_ADeviceThatIsGoneIsDetached(t *testing.T) {
	n := Nodes{Dir: t.TempDir()}
	const nobodys = 240 // Documentation/admin-guide/devices.txt: for local use
	node := filepath.Join(n.Dir, "loop0")
	check(t, linux.Mknod(node, nobodys, 0))
	d := Device{Path: node, Major: nobodys}
	if _, err := linux.Open(node, syscall.O_RDONLY); !errors.Is(err, linux.ENXIO) {
		t.Fatalf("a device that is gone: %v", err)
	}
	check(t, n.Detach(d))
	check(t, clearHold(d))
	if _, ok, err := n.Now(d); ok || err != nil {
		t.Errorf("a device that is gone is there (%v), %v", ok, err)
	}
	if err := d.keep(); !away(err) {
		t.Errorf("a device that is gone is kept: %v", err)
	}
	d.Held = true
	if changed, err := n.Restore(d, "image"); changed != nil || err != nil {
		t.Errorf("a device that is gone was mended: %v, %v", changed, err)
	}
}

// TestA12_AHoldsNumberIsTakenAgain: the kernel reuses the number of a released hold next, and its
// new owner is not asked to release it.
func TestA12_AHoldsNumberIsTakenAgain(t *testing.T) {
	n := Nodes{Dir: t.TempDir()}
	below := attach(t, image(t), true)
	d, err := n.Hold(below)
	check(t, err)
	hold, err := n.open(d.hold.name)
	check(t, err)
	check(t, n.Release(d))
	other := attach(t, image(t), true)
	hold.Path = other.Path // as if the kernel had given the hold's number to the other device
	check(t, clearHold(hold))
	if !bound(t, other) {
		t.Error("somebody else's device was unbound")
	}
	below.Path = other.Path
	if err := below.keep(); !away(err) {
		t.Errorf("somebody else's device is kept: %v", err)
	}
}

// TestA12_AMissingNodeIsNoMissingDevice: a device whose node was removed is still bound, and must
// not be reported as detached.
func TestA12_AMissingNodeIsNoMissingDevice(t *testing.T) {
	n := Nodes{Dir: t.TempDir()}
	d := attach(t, image(t), false)
	nodeless := d
	nodeless.Path = filepath.Join(n.Dir, filepath.Base(d.Path))
	if err := n.Detach(nodeless); err == nil {
		t.Error("it was detached")
	}
	if _, _, err := n.Now(nodeless); err == nil {
		t.Error("nothing was seen of it, and that is no error")
	}
	if is, err := nodeless.bound(); err == nil {
		t.Errorf("bound: %v", is)
	}
	if err := clearHold(nodeless); err == nil {
		t.Error("its hold was taken off")
	}
	if !bound(t, d) {
		t.Error("it was unbound")
	}
}

// A12: a device that was unbound, and is bound to another file by now, is not waited for.
func TestA12_ADeviceThatIsAnothersByNowIsReleased(t *testing.T) {
	n := Nodes{Dir: t.TempDir()}
	var d Device
	other := image(t)
	for tries := 1; ; tries++ {
		var err error
		d, err = n.Attach(image(t), false)
		check(t, err)
		if out, err := exec.Command("losetup", "-d", d.Path).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		out, err := exec.Command("losetup", d.Path, other).CombinedOutput()
		if err == nil {
			break
		}
		if tries == 100 {
			t.Fatalf("%v\n%s", err, out)
		}
	} // or some other program has it by now
	defer func() { check(t, exec.Command("losetup", "-d", d.Path).Run()) }()
	if err := n.Detach(d); err != nil {
		t.Error(err)
	}
	if _, err := linux.ReadSmall("/sys/block/" + filepath.Base(d.Path) + "/loop/backing_file"); err != nil {
		t.Errorf("the other file's device: %v", err)
	}
}
