package driver_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// deferred stages a volume and defers it to the runtime of a pod. device is that of a static volume, "" for another one.
func (r *rig) deferred(id, device string) (request *csi.NodePublishVolumeRequest) {
	r.t.Helper()
	must(r.t, os.MkdirAll(r.staging(id), 0o755))
	attributes := map[string]string{"allowRuntimeAssistedMount": "true"}
	if device != "" {
		attributes["device"] = device
	}
	_, err := r.d.NodeStageVolume(r.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: r.staging(id),
		VolumeCapability: fileSystem("ext4"), VolumeContext: attributes})
	must(r.t, err)
	request = &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: r.staging(id), TargetPath: filepath.Join(r.dir, "pod"),
		VolumeCapability: fileSystem("ext4"), VolumeContext: attributes}
	must(r.t, crust.SetSupportedFilesystems(request, []string{"ext4"}))
	_, err = r.d.NodePublishVolume(r.t.Context(), request)
	must(r.t, err)
	return request
}

// C08: a guest has a static volume, and the record of its stage was torn. The volume is not given back while the guest has it.
func TestC08_AStaticVolumeThatAGuestHasIsNotGivenBack(t *testing.T) {
	r := newRig(t)
	device := r.disk("disk", "mkfs.ext4 -q "+r.dir+"/disk")
	target := r.deferred("v", device).GetTargetPath()
	guest, err := linux.Open(device, os.O_RDWR|linux.OExcl)
	must(t, err)
	for _, torn := range []bool{false, true} {
		if torn {
			r.stop()
			r.spoil("state/staged", "torn")
			r.start()
		}
		if err := r.unpublish("v", target); !fault.Is(err, fault.State) {
			t.Errorf("unpublished while a guest has it: %v", err)
		}
		if err := r.unstage("v"); err == nil {
			t.Error("unstaged while a guest has it")
		}
	}
	must(t, guest.Close())
	must(t, r.unpublish("v", target))
	must(t, r.unstage("v"))
}

// C08: a kubelet that is not sure how a publish ended asks again. An error that it takes for final would keep it from ever unpublishing.
func TestC08_ARepeatedPublishOfADeferralHasNoFinalError(t *testing.T) {
	r := newRig(t)
	id := r.create("v", fileSystem("ext4"), 64<<20)
	request := r.deferred(id, "")
	request.ProtoReflect().SetUnknown(nil) // the node should mount it now
	if _, err := r.d.NodePublishVolume(t.Context(), request); !fault.Is(err, fault.Unavailable) {
		t.Errorf("at the same target: %v", err)
	}
	request.TargetPath += "-2"
	if _, err := r.d.NodePublishVolume(t.Context(), request); !fault.Is(err, fault.State) {
		t.Errorf("at another target: %v", err)
	}
	must(t, r.unpublish(id, filepath.Join(r.dir, "pod")))
	must(t, r.unstage(id))
}

// C08: the record of a deferral was lost. The pod can end, but not while a guest has the volume.
func TestC08_ADeferralWithoutARecordEnds(t *testing.T) {
	r := newRig(t)
	id := r.create("v", fileSystem("ext4"), 64<<20)
	target := r.deferred(id, "").GetTargetPath()
	device := shell(t, "losetup -nO NAME,BACK-FILE | awk -v d="+r.dir+"/p/ 'index($2, d) == 1 {print $1}'")
	r.stop()
	must(t, os.RemoveAll(r.dir+"/state/deferred"))
	r.start()
	guest, err := linux.Open(device, os.O_RDWR|linux.OExcl)
	must(t, err)
	if err := r.unpublish(id, target); !fault.Is(err, fault.State) {
		t.Errorf("unpublished while a guest has it: %v", err)
	}
	must(t, guest.Close())
	must(t, r.unpublish(id, target))
	if _, err := os.Lstat(target); !os.IsNotExist(err) {
		t.Errorf("the target is left: %v", err)
	}
	must(t, r.unstage(id))
}

// C08: a hypervisor need not hold its disk exclusively, and a sandbox may not have opened it yet. No other volume gets a deferred device.
func TestC08_ADeferredDeviceIsNoOtherVolumes(t *testing.T) {
	r := newRig(t)
	device := r.disk("disk", "mkfs.ext4 -q "+r.dir+"/disk")
	target := r.deferred("v", device).GetTargetPath()
	r.stop()
	r.spoil("state/staged", "torn")
	for range 2 {
		r.start()
		if err := r.stage("other", fileSystem("ext4"), device); err == nil {
			t.Error("two volumes have one device")
			must(t, r.unstage("other"))
		}
		r.stop()
	}
	r.start()
	must(t, r.unpublish("v", target))
	must(t, r.unstage("v"))
}

// C06, C07: how large a share is, its server decides, whether the node has mounted it or a pod's runtime: an expansion succeeds, and asks
// nothing of the runtime.
func TestC06_C07_AnExpansionOfADeferredShare(t *testing.T) {
	r := newRig(t)
	attributes := map[string]string{"server": "nas", "share": "/data", "allowRuntimeAssistedMount": "true"}
	must(t, os.MkdirAll(r.staging("v"), 0o755))
	_, err := r.d.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: r.staging("v"),
		VolumeCapability: fileSystem(""), VolumeContext: attributes})
	must(t, err)
	target := filepath.Join(r.dir, "pod")
	publish := &csi.NodePublishVolumeRequest{VolumeId: "v", StagingTargetPath: r.staging("v"), TargetPath: target,
		VolumeCapability: fileSystem(""), VolumeContext: attributes}
	must(t, crust.SetSupportedFilesystems(publish, []string{fstype.NFS}))
	_, err = r.d.NodePublishVolume(t.Context(), publish)
	must(t, err)
	for _, grows := range []bool{false, true} {
		expand := &csi.NodeExpandVolumeRequest{VolumeId: "v", VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 40}}
		must(t, crust.SetSupportsExpand(expand, grows))
		answer, err := r.d.NodeExpandVolume(t.Context(), expand)
		if err != nil {
			t.Errorf("the runtime grows file systems: %v: %v", grows, err)
			continue
		}
		if source, err := crust.ExpandSource(answer); err != nil || source != "" {
			t.Errorf("the runtime is asked to grow %q, %v", source, err)
		}
	}
	must(t, r.unpublish("v", target))
	must(t, r.unstage("v"))
}
