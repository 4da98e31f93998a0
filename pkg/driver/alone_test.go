package driver_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/driver"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

// A driver with a zero Log, Metrics, Audit and Programs takes a volume through its whole life, also
// in a process that continues.
func TestADriverOfTheRequiredFieldsOnly(t *testing.T) {
	dir := t.TempDir()
	root, err := mounter.OpenRoot(dir)
	must(t, err)
	defer root.Close()
	pool, err := looppool.Open(looppool.Options{Name: "files", Dir: dir + "/pool", NodesDir: dir + "/dev", Reserve: 1 << 20})
	must(t, err)
	defer pool.Close()
	volumes, err := volume.NewRegistry(nil, pool)
	must(t, err)
	config := driver.Config{Name: "files.example.com", NodeID: "node-1", StateDir: dir + "/state", Root: root, Volumes: volumes,
		AppliesGroups: true}
	d, err := driver.New(config)
	must(t, err)
	if d.Log == nil || d.Metrics == nil || d.Programs == nil {
		t.Fatalf("%+v", d.Config)
	}
	created, err := d.CreateVolume(t.Context(), exampleVolume)
	must(t, err)
	id, capability := created.GetVolume().GetVolumeId(), exampleVolume.GetVolumeCapabilities()[0]
	staging, target := filepath.Join(dir, "staging"), filepath.Join(dir, "pod")
	must(t, os.Mkdir(staging, 0o755))
	_, err = d.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging,
		VolumeCapability: capability})
	must(t, err)
	for _, readOnly := range []bool{false, true} {
		_, err = d.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging,
			TargetPath: target, VolumeCapability: capability, Readonly: readOnly})
		must(t, err)
		var st syscall.Stat_t
		if must(t, syscall.Stat(target, &st)); st.Gid != 2000 {
			t.Errorf("the volume's root has group %d", st.Gid)
		}
		_, err = d.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target})
		must(t, err)
		_, err = d.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
		must(t, err)
		d.Drain(t.Context())
		d, err = driver.New(config)
		must(t, err)
		_, err = d.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		must(t, err)
	}
	if _, err := d.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); !fault.Is(err, fault.State) {
		t.Errorf("a staged volume is deleted: %v", err)
	}
	_, err = d.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	must(t, err)
	_, err = d.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	d.Drain(t.Context())
}

// What a driver cannot be without is refused at once, not met as a crash later.
func TestADriverWithoutARequiredField(t *testing.T) {
	dir := t.TempDir()
	root, err := mounter.OpenRoot(dir)
	must(t, err)
	defer root.Close()
	volumes, err := volume.NewRegistry(nil)
	must(t, err)
	whole := driver.Config{Name: "files.example.com", NodeID: "node-1", StateDir: dir + "/state", Root: root, Volumes: volumes}
	for what, without := range map[string]func(*driver.Config){
		"Name": func(c *driver.Config) { c.Name = "" }, "NodeID": func(c *driver.Config) { c.NodeID = "" },
		"StateDir": func(c *driver.Config) { c.StateDir = "" }, "Root": func(c *driver.Config) { c.Root = nil },
		"Volumes": func(c *driver.Config) { c.Volumes = nil },
	} {
		config := whole
		without(&config)
		if d, err := driver.New(config); d != nil || !fault.Is(err, fault.Invalid) {
			t.Errorf("without %s: %v, %v", what, d, err)
		}
	}
	d, err := driver.New(whole)
	must(t, err)
	d.Drain(t.Context())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
