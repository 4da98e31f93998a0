package loopdev

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// The purpose of each flag of a loop device: without it, one of these tests fails.

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func image(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	check(t, os.WriteFile(path, nil, 0o600))
	check(t, os.Truncate(path, 16<<20))
	return path
}

func attach(t *testing.T, path string, readOnly bool) Device {
	t.Helper()
	n := Nodes{Dir: t.TempDir()}
	d, err := n.Attach(path, readOnly)
	check(t, err)
	t.Cleanup(func() { check(t, n.Detach(d)) })
	return d
}

// bound reports whether the device is still bound to its file.
func bound(t *testing.T, d Device) bool {
	t.Helper()
	_, ok, err := Nodes{Dir: t.TempDir()}.Now(d)
	check(t, err)
	return ok
}

func sysfs(t *testing.T, d Device, name string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/%s", d.Major, d.Minor, name))
	check(t, err)
	return strings.TrimSpace(string(b))
}

func TestWhatADeviceIsBoundAs(t *testing.T) {
	path := image(t)
	rw, ro := attach(t, path, false), attach(t, path, true)
	for _, c := range []struct {
		d          Device
		name, want string
	}{
		{rw, "ro", "0"},
		{ro, "ro", "1"},
		{rw, "loop/autoclear", "0"},
		{ro, "loop/autoclear", "0"},
		{rw, "queue/logical_block_size", "512"},
	} {
		if got := sysfs(t, c.d, c.name); got != c.want {
			t.Errorf("%s: %s is %s, want %s", c.d.Path, c.name, got, c.want)
		}
	}
	// No second pass through the page cache, if the file's file system allows that.
	if f, err := linux.Open(path, os.O_RDWR|syscall.O_DIRECT); err == nil {
		f.Close()
		if got := sysfs(t, rw, "loop/dio"); got != "1" {
			t.Errorf("%s: loop/dio is %s", rw.Path, got)
		}
	}
	// Nobody writes through a read-only device, whatever its node's mode.
	if f, err := os.OpenFile(ro.Path, os.O_RDWR, 0); err == nil {
		_, err = f.Write(make([]byte, 4096))
		f.Close()
		if err == nil {
			t.Error("a read-only device took a write")
		}
	}
	if again, err := (Nodes{Dir: t.TempDir()}).Attach(path, false); err != nil || again.Path != rw.Path {
		t.Errorf("bound once more: %+v %v", again, err)
	}
}

func TestATemporaryDeviceGoesWithItsDescriptor(t *testing.T) {
	f, err := os.OpenFile(image(t), os.O_RDWR, 0)
	check(t, err)
	defer f.Close()
	loop, err := Nodes{Dir: t.TempDir()}.Temporary(f)
	check(t, err)
	d, err := status(loop)
	check(t, err)
	check(t, loop.Close())
	if bound(t, d) {
		t.Error("it is still bound")
		check(t, Nodes{Dir: t.TempDir()}.Detach(d))
	}
}

// A detach is refused while anybody has the device open, and an attach undoes a detach that waits
// for the last user.
func TestADetachOfADeviceThatIsInUse(t *testing.T) {
	path := image(t)
	d := attach(t, path, false)
	user, err := linux.Open(d.Path, os.O_RDONLY|linux.OExcl)
	check(t, err)
	if err := (Nodes{Dir: t.TempDir()}).Detach(d); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("%v", err)
	}
	if got := sysfs(t, d, "loop/autoclear"); got != "0" {
		t.Errorf("the refused detach left autoclear at %s", got)
	}
	second, err := linux.Open(d.Path, os.O_RDONLY)
	check(t, err)
	check(t, linux.LoopClear(user)) // another process: it waits for the last close
	if got := sysfs(t, d, "loop/autoclear"); got != "1" {
		t.Fatalf("autoclear is %s", got)
	}
	again, err := Nodes{Dir: t.TempDir()}.Attach(path, false)
	check(t, err)
	check(t, user.Close())
	check(t, second.Close())
	if again.Path != d.Path {
		t.Errorf("bound to %s, and now to %s", d.Path, again.Path)
		check(t, Nodes{Dir: t.TempDir()}.Detach(again))
	}
	if !bound(t, d) {
		t.Error("it went with its last user")
	}
}

// What another opener read before does not hide what is on the device now.
func TestADirectReadSeesTheDevice(t *testing.T) {
	path := image(t)
	a, b := attach(t, path, false), attach(t, path, true)
	reader, err := os.Open(b.Path)
	check(t, err)
	defer reader.Close()
	old := make([]byte, 4096)
	_, err = reader.ReadAt(old, 0)
	check(t, err)
	writer, err := os.OpenFile(a.Path, os.O_RDWR|os.O_SYNC, 0)
	check(t, err)
	_, err = writer.WriteAt([]byte("new"), 0)
	check(t, err)
	check(t, writer.Close())
	if _, err = reader.ReadAt(old, 0); err != nil || string(old[:3]) == "new" {
		t.Fatalf("the cache is not stale, so nothing can be told: %q %v", old[:3], err)
	}
	direct, err := linux.Open(b.Path, os.O_RDONLY|linux.ODirect)
	check(t, err)
	defer direct.Close()
	got := make([]byte, 3)
	_, err = linux.Direct{File: direct}.ReadAt(got, 0)
	if err != nil || string(got[:3]) != "new" {
		t.Errorf("read directly: %q %v", got[:3], err)
	}
}
