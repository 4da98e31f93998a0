package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// TestA01_AFileWithALongPathIsFound: the kernel does not show a path of more than 4095 bytes. A pod
// can make its device show such a file.
func TestA01_AFileWithALongPathIsFound(t *testing.T) {
	path := image(t)
	deep, err := os.Open(filepath.Dir(path))
	check(t, err)
	name := strings.Repeat("d", 250)
	for range 20 {
		at := fmt.Sprintf("/proc/self/fd/%d/%s", deep.Fd(), name)
		check(t, os.Mkdir(at, 0o755))
		next, err := os.Open(at)
		check(t, err)
		deep.Close()
		deep = next
	}
	defer deep.Close()
	at := fmt.Sprintf("/proc/self/fd/%d/link", deep.Fd())
	check(t, os.Link(path, at))
	d := attach(t, at, true)
	n := Nodes{Dir: t.TempDir()}
	for what, find := range map[string]func(string) ([]Device, error){"Find": n.Find, "References": n.References} {
		found, err := find(path)
		check(t, err)
		if len(found) != 1 || found[0].Path != d.Path {
			t.Errorf("%s: %v", what, found)
		}
	}
}

// TestD06_AFileThatCannotBeLookedAtIsTold: a pool may not take the devices that it found for all that there are.
func TestD06_AFileThatCannotBeLookedAtIsTold(t *testing.T) {
	path, gone := image(t), filepath.Join(t.TempDir(), "gone")
	d := attach(t, path, true)
	n := Nodes{Dir: t.TempDir()}
	for other, want := range map[string]error{filepath.Join(path, "below-a-file"): linux.ENOTDIR, gone: nil} {
		found, err := n.Over([]string{other, path})
		if !errors.Is(err, want) || len(found[path]) != 1 || found[path][0].Path != d.Path {
			t.Errorf("beside %s: %v, %v", other, found, err)
		}
	}
}

// TestA12_AStrangersDeviceIsItsOwnTrouble: the file behind another's loop device may be on a server
// that is gone; that is no error. For the volume's own device it is.
func TestA12_AStrangersDeviceIsItsOwnTrouble(t *testing.T) {
	path, other := image(t), image(t)
	d := attach(t, path, false)
	answer := errors.New("transport endpoint is not connected")
	n := Nodes{Dir: t.TempDir(), opens: func(name string) (Device, error) {
		if "/dev/"+name == d.Path {
			return Device{}, answer
		}
		return Nodes{Dir: t.TempDir()}.open(name)
	}}
	check(t, os.Rename(other, other+"-2")) // every file is named image
	for what, find := range map[string]func(string) ([]Device, error){"Find": n.Find, "References": n.References} {
		if found, err := find(other + "-2"); err != nil || len(found) != 0 {
			t.Errorf("%s of another file: %v, %v", what, found, err)
		}
		if _, err := find(path); err == nil {
			t.Errorf("%s: a device that cannot be looked at is none", what)
		}
	}
	answer = fmt.Errorf("open: %w", linux.EMFILE) // a problem of this process itself
	if _, err := n.References(other + "-2"); err == nil {
		t.Error("a device that nobody looked at is a stranger's")
	}
}

// TestA12_D11_ALookThatHangsIsLeft: a look that hangs is abandoned, and not repeated until it
// returns.
func TestA12_D11_ALookThatHangsIsLeft(t *testing.T) {
	var l looks
	answers := make(chan Device)
	var begun atomic.Int32
	hung := func() (Device, error) { begun.Add(1); return <-answers, nil }
	for range 3 {
		if _, err := l.within(10*time.Millisecond, "loop0 1", hung); !fault.Is(err, fault.Busy) {
			t.Errorf("a look that hangs: %v", err)
		}
	}
	if n := begun.Load(); n > 1 {
		t.Errorf("%d looks hang", n)
	}
	answer := func(path string) func() (Device, error) {
		return func() (Device, error) { return Device{Path: path}, nil }
	}
	if d, err := l.within(time.Minute, "loop1 1", answer("/dev/loop1")); err != nil || d.Path != "/dev/loop1" {
		t.Errorf("another device: %v, %v", d, err)
	}
	answers <- Device{}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if d, err := l.within(time.Minute, "loop0 1", answer("/dev/loop0")); err == nil && d.Path == "/dev/loop0" {
			return
		}
		if time.Now().After(end) {
			t.Fatal("it has come back, and nobody looks")
		}
	}
}

// TestA12_ManyMakeOneNode: all callers that ask for a free device get the same one.
func TestA12_ManyMakeOneNode(t *testing.T) {
	for range 50 {
		n := Nodes{Dir: filepath.Join(t.TempDir(), "dev")}
		failed := make(chan error, 16)
		for range cap(failed) {
			go func() {
				path, err := n.NodeOf("not-in-dev", 7, 1)
				if err == nil {
					_, err = linux.StatxPath(path)
				}
				failed <- err
			}()
		}
		for range cap(failed) {
			check(t, <-failed)
		}
	}
}
