package driver

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// C08: if the directory of all targets cannot be found, that says nothing about one target. So the
// record of its deferral stays.
func TestC08_AMissingKubeletDirectoryEndsNoDeferral(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kubelet")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	root, err := mounter.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	registry, err := volume.NewRegistry(nil)
	if err != nil {
		t.Fatal(err)
	}
	records, err := loadDeferrals(t.TempDir(), "boot")
	if err != nil {
		t.Fatal(err)
	}
	d := &Driver{Config: Config{Root: root, Volumes: registry, Log: slog.New(slog.DiscardHandler)}, deferrals: records,
		staged: &stagedVolumes{}}
	r := deferral{VolumeID: "v", BootID: "boot", Target: filepath.Join(dir, "target"), Source: "/dev/null", Type: "ext4"}
	if err := records.put(r); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	err = d.undefer("v", r)
	if _, known := records.at("v", r.Target); err == nil || fault.Is(err, fault.NotFound) || !known {
		t.Errorf("%v, kind %v; the record is there: %t", err, fault.KindOf(err), known)
	}
}

// To a CSI caller, NotFound is about the volume. A device that is gone is a state of it.
func TestADeviceThatIsGoneIsAState(t *testing.T) {
	_, err := superblock.ProbeDevice(filepath.Join(t.TempDir(), "nope"))
	if err := volume.OfDevice("v", err); !fault.Is(err, fault.State) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, kind %v", err, fault.KindOf(err))
	}
	for text, want := range map[string]string{
		"volume v: gone": "volume v: gone", "volume v10: gone": "volume v: volume v10: gone", "/dev/x: gone": "volume v: /dev/x: gone",
	} {
		if got := volume.OfDevice("v", errors.New(text)).Error(); got != want {
			t.Errorf("%s: %s", text, got)
		}
	}
	if err := volume.OfDevice("v", fault.New(fault.NotFound, "volume v does not exist")); !fault.Is(err, fault.NotFound) {
		t.Errorf("the volume itself: %v, kind %v", err, fault.KindOf(err))
	}
}
