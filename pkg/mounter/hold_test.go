package mounter

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A driver or a runtime that mounts later holds the device until then.
func TestC12_ADeviceIsHeld(t *testing.T) {
	d, other := formatted(t, "ext4"), formatted(t, "ext4")
	held, err := Hold(d)
	check(t, err)
	defer held.Close()
	if busy, err := Busy(d.Path); !busy || err != nil {
		t.Errorf("a held device: busy %v, %v", busy, err)
	}
	if m, err := Open(Filesystem{Device: d, Type: "ext4"}); !fault.Is(err, fault.State) {
		t.Errorf("a held device was mounted: %v, %v", m, err)
	}
	if again, err := Hold(d); !fault.Is(err, fault.State) || !errors.Is(err, linux.EBUSY) {
		t.Errorf("held twice: %v, %v", again, err)
	}
	reader, err := os.Open(d.Path) // as a hypervisor, or a pod with a raw block volume
	check(t, err)
	check(t, reader.Close())
	check(t, held.Close())

	m, err := Open(Filesystem{Device: d, Type: "ext4"})
	check(t, err)
	if f, err := Hold(d); !fault.Is(err, fault.State) || !errors.Is(err, linux.EBUSY) {
		t.Errorf("a mounted device: %v, %v", f, err)
	}
	check(t, m.Close())

	fifo := filepath.Join(t.TempDir(), "fifo")
	check(t, syscall.Mkfifo(fifo, 0o600))
	for what, wrong := range map[string]struct {
		Device
		kind fault.Kind
	}{
		"another's number": {Device{Path: other.Path, Major: d.Major, Minor: d.Minor}, fault.State},
		"no number":        {Device{Path: d.Path}, fault.Invalid},
		"nothing":          {Device{}, fault.Invalid},
		"no device":        {Device{Path: fifo, Major: d.Major, Minor: d.Minor}, fault.State},
		"no node":          {Device{Path: fifo + "x", Major: d.Major, Minor: d.Minor}, fault.State},
	} {
		if f, err := Hold(wrong.Device); !fault.Is(err, wrong.kind) || !strings.Contains(err.Error(), wrong.Path) {
			t.Errorf("%s: %v, %v", what, f, err)
		}
	}
	if busy, err := Busy(other.Path); busy || err != nil {
		t.Errorf("a device that was refused: busy %v, %v", busy, err)
	}
}
