package mounter_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// deviceAndTarget returns a formatted device and a target that does not exist.
func deviceAndTarget(t *testing.T) (mounter.Device, *mounter.Target) {
	device, kubelet, end := exampleDevice()
	t.Cleanup(end)
	root, err := mounter.OpenRoot(kubelet)
	check(err)
	t.Cleanup(func() { root.Close() })
	target, err := root.Target(filepath.Join(kubelet, "mount"))
	check(err)
	t.Cleanup(func() { target.Close() })
	return device, target
}

// Another volume's mount at a target differs from the requested one.
func TestAnotherDeviceDiffers(t *testing.T) {
	device, target := deviceAndTarget(t)
	fs := mounter.Filesystem{Device: device, Type: "ext4"}
	m, err := mounter.Open(fs)
	check(err)
	check(m.Attach(target))
	check(m.Close())
	state, err := target.Look()
	check(err)
	if differs, err := state.Differs(fs); differs != "" || err != nil {
		t.Errorf("the same device: %q, %v", differs, err)
	}
	fs.Device.Minor++
	if differs, err := state.Differs(fs); !strings.Contains(differs, "another device") || err != nil {
		t.Errorf("another device: %q, %v", differs, err)
	}
	state.Close()
	check(target.Unmount())
	check(target.Remove())
}
