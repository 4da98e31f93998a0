package mounter

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// The device of a mount can be measured and grown without anything else about it.
func TestTheDeviceOfAMountHasAPath(t *testing.T) {
	for _, fstype := range filesystems {
		t.Run(fstype, func(t *testing.T) {
			d, r := formatted(t, fstype), openRoot(t)
			mountAt(t, r, Filesystem{Device: d, Type: fstype}, "m")
			defer unmountAt(t, r, "m")
			s := lookAt(t, r, "m")
			defer s.Close()
			got, ok, err := s.Device()
			if err != nil || !ok || got.Path != d.Path || !got.Same(d) {
				t.Fatalf("%+v, %v, %v; want %+v", got, ok, err, d)
			}
			file := strings.TrimSpace(sh(t, "losetup", "-n", "-O", "BACK-FILE", d.Path))
			sh(t, "truncate", "-s", "640M", file)
			sh(t, "losetup", "-c", d.Path)
			if size, err := DeviceSize(got); err != nil || size != 640<<20 {
				t.Errorf("%d bytes, %v", size, err)
			}
			if GrowsOffline(fstype) || NeverGrows(fstype) != nil {
				return
			}
			dir, err := s.Dir()
			check(t, err)
			defer dir.Close()
			if usage, err := s.Usage(); err != nil || usage.TotalBytes > 320<<20 {
				t.Errorf("%d bytes before, %v", usage.TotalBytes, err)
			}
			check(t, Grow(dir, fstype, got))
			if usage, err := s.Usage(); err != nil || usage.TotalBytes < 450<<20 {
				t.Errorf("%d bytes, %v", usage.TotalBytes, err)
			}
		})
	}
}

func TestTheDeviceOfABoundNodeHasAPath(t *testing.T) {
	d, r := formatted(t, "ext4"), openRoot(t)
	m, err := OpenDevice(d)
	check(t, err)
	target, err := r.Target(filepath.Join(r.Path(), "raw"))
	check(t, err)
	check(t, m.Attach(target))
	check(t, m.Close())
	check(t, target.Close())
	defer unmountAt(t, r, "raw")
	s := lookAt(t, r, "raw")
	defer s.Close()
	if got, ok, err := s.Device(); err != nil || !ok || got.Path != d.Path || !got.Same(d) {
		t.Errorf("%+v, %v, %v; want %+v", got, ok, err, d)
	}
}

func lookAt(t *testing.T, r *Root, name string) *State {
	t.Helper()
	target, err := r.Target(filepath.Join(r.Path(), name))
	check(t, err)
	defer target.Close()
	s, err := target.Look()
	check(t, err)
	return s
}

// A node counts only if it has the number. Without one, the error names the device.
func TestANodeOfAnotherNumberIsNotTheDevice(t *testing.T) {
	sys, dev := t.TempDir(), t.TempDir()
	at := func(major, minor int, name string) {
		check(t, os.MkdirAll(sys+"/dev/block", 0o755))
		check(t, os.Symlink("../../devices/virtual/block/"+name, sys+"/dev/block/"+strconv.Itoa(major)+":"+strconv.Itoa(minor)))
	}
	at(7, 4001, "right")
	at(7, 4002, "wrong")
	at(7, 4003, "absent")
	at(7, 4004, "array!disk")
	check(t, os.Mkdir(dev+"/array", 0o755))
	for name, minor := range map[string]string{"right": "4001", "wrong": "4001", "array/disk": "4004"} {
		sh(t, "mknod", filepath.Join(dev, name), "b", "7", minor)
	}
	for minor, want := range map[uint32]string{4001: dev + "/right", 4002: "", 4003: "", 4004: dev + "/array/disk", 4005: ""} {
		if got := nodeOf(sys, dev, 7, minor); got != want {
			t.Errorf("7:%d: %q, want %q", minor, got, want)
		}
	}
	nodeless := Device{Major: 7, Minor: 4003}
	_, sizeErr := DeviceSize(nodeless)
	dir, err := os.Open(dev)
	check(t, err)
	defer dir.Close()
	for what, err := range map[string]error{"DeviceSize": sizeErr, "Grow": Grow(dir, "ext4", nodeless)} {
		if !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "7:4003") || !strings.Contains(err.Error(), "Path") {
			t.Errorf("%s: %v, kind %v", what, err, fault.KindOf(err))
		}
	}
}
