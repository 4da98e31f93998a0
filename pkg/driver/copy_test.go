package driver_test

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A copy for which nobody names a file system has that of its origin. It is the same copy when the call is repeated.
func TestD06_ACopyHasTheFileSystemOfItsOrigin(t *testing.T) {
	r := newRig(t)
	id := r.create("v", fileSystem("xfs"), 320<<20)
	s, err := r.d.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	must(t, err)
	for name, source := range map[string]*csi.VolumeContentSource{
		"clone": {Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}},
		"restore": {Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshot().GetSnapshotId()}}},
	} {
		request := &csi.CreateVolumeRequest{Name: name + r.dir, VolumeCapabilities: []*csi.VolumeCapability{fileSystem("")},
			VolumeContentSource: source}
		made, err := r.d.CreateVolume(t.Context(), request)
		must(t, err)
		again, err := r.d.CreateVolume(t.Context(), request)
		if err != nil || again.GetVolume().GetVolumeId() != made.GetVolume().GetVolumeId() {
			t.Errorf("%s: the repeated call: %v, %v", name, again, err)
		}
		copied := made.GetVolume().GetVolumeId()
		must(t, r.stage(copied, fileSystem("")))
		target, err := r.publish(copied, "pod", fileSystem(""), false)
		must(t, err)
		if got := shell(t, "stat -fc %T "+target); got != "xfs" {
			t.Errorf("%s: it has %s", name, got)
		}
		must(t, r.unpublish(copied, target))
		must(t, r.unstage(copied))
		request.Name, request.VolumeCapabilities[0] = "another"+request.Name, fileSystem("ext4")
		if _, err := r.d.CreateVolume(t.Context(), request); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s as ext4: %v", name, err)
		}
		request.VolumeCapabilities[0] = rawBlock()
		if _, err := r.d.CreateVolume(t.Context(), request); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s as raw block: %v", name, err)
		}
	}
}

// A claim goes to another node if this one's kernel does not know the file system. A sandbox may know it.
func TestB09_AFileSystemThatTheKernelDoesNotKnow(t *testing.T) {
	const unknown = "f2fs"
	if shell(t, "grep -w "+unknown+" /proc/filesystems || find /lib/modules/$(uname -r) -name '"+unknown+".ko*' 2>/dev/null || true") != "" {
		t.Log("this kernel knows " + unknown)
		return
	}
	r := newRig(t)
	r.d.Defers = false
	request := &csi.CreateVolumeRequest{Name: "v" + r.dir, VolumeCapabilities: []*csi.VolumeCapability{fileSystem(unknown)},
		CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}, Parameters: map[string]string{"allowRuntimeAssistedMount": "true"}}
	if _, err := r.d.CreateVolume(t.Context(), request); !fault.Is(err, fault.Elsewhere) || !strings.Contains(err.Error(), unknown) {
		t.Errorf("%s: %v", unknown, err)
	}
	r.d.Defers = true
	made, err := r.d.CreateVolume(t.Context(), request)
	if err != nil {
		t.Fatalf("%s, which a sandbox may mount: %v", unknown, err)
	}
	// The call is repeated after the sandboxes are gone, and a copy cannot go to another node.
	r.d.Defers = false
	if _, err := r.d.CreateVolume(t.Context(), request); err != nil {
		t.Errorf("the repeated call: %v", err)
	}
	request.Name = "copy" + request.Name
	request.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: made.GetVolume().GetVolumeId()}}}
	if _, err := r.d.CreateVolume(t.Context(), request); !fault.Is(err, fault.State) {
		t.Errorf("a copy: %v", err)
	}
}
