package driver_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// spoil damages the only record in a directory: "torn" makes it empty, "newer" gives it an unknown version.
func (r *rig) spoil(dir, how string) {
	r.t.Helper()
	files, err := filepath.Glob(filepath.Join(r.dir, dir, "*.json"))
	must(r.t, err)
	if len(files) != 1 {
		r.t.Fatalf("%q", files)
	}
	b, err := os.ReadFile(files[0])
	must(r.t, err)
	next := ""
	if how == "newer" {
		next = strings.Replace(string(b), `"version":1`, `"version":99`, 1)
		next = strings.Replace(next, `"version": 1`, `"version": 99`, 1)
	}
	if next == string(b) {
		r.t.Fatalf("%s has no version: %s", files[0], b)
	}
	must(r.t, os.WriteFile(files[0], []byte(next), 0o600))
}

// A pod with a static volume can end though the record of its stage cannot be used. Until then the volume is not unstaged, and no other
// volume gets the device.
func TestA10_ABadRecordOfAStageOfAStaticVolume(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{"file system": fileSystem("ext4"), "raw": rawBlock()} {
		for _, how := range []string{"torn", "newer"} {
			for _, readOnly := range []bool{false, true} {
				t.Run(name+" "+how, func(t *testing.T) {
					r := newRig(t)
					device := r.disk("disk", "mkfs.ext4 -q "+r.dir+"/disk")
					must(t, r.stage("v", capability, device))
					target, err := r.publish("v", "pod", capability, readOnly, device)
					must(t, err)
					r.stop()
					r.spoil("state/staged", how)
					r.start()
					r.stop() // a torn record is set aside once
					r.start()
					if err := r.stage("other", fileSystem("ext4"), device); err == nil {
						t.Error("two volumes have one device")
						must(t, r.unstage("other"))
					}
					if err := r.unstage("v"); err == nil {
						t.Error("it is unstaged while a pod has it")
					}
					if err := exec.Command("mountpoint", "-q", target).Run(); err != nil {
						t.Errorf("the pod has lost its volume: %v", err)
					}
					must(t, r.unpublish("v", target))
					must(t, r.unstage("v"))
					must(t, r.stage("other", fileSystem("ext4"), device))
					must(t, r.unstage("other"))
					if left := shell(t, "losetup -nO BACK-FILE | grep -c '^"+device+"$' || true"); left != "0" {
						t.Errorf("%s devices are left on %s", left, device)
					}
				})
			}
		}
	}
}

// A power loss tore the record of a stage. Nothing has the device, so another volume may.
func TestA10_ATornRecordOfAStageHoldsNoDevice(t *testing.T) {
	r := newRig(t)
	device := r.disk("disk", "mkfs.ext4 -q "+r.dir+"/disk")
	must(t, r.stage("v", fileSystem("ext4"), device))
	r.stop()
	r.spoil("state/staged", "torn")
	r.start()
	must(t, r.stage("other", fileSystem("ext4"), device))
	must(t, r.unstage("other"))
}

// A disk that was given out raw is never formatted, nor is a part of it, also when the record of the disk cannot be used.
func TestA03_APartOfADiskThatWasGivenOutRaw(t *testing.T) {
	for _, how := range []string{"", "torn", "newer", "missing", "both torn"} {
		t.Run(how, func(t *testing.T) {
			r := newRig(t)
			whole := r.disk("disk", "true")
			must(t, r.stage("raw", rawBlock(), whole))
			target, err := r.publish("raw", "pod", rawBlock(), false, whole)
			must(t, err)
			must(t, r.unpublish("raw", target))
			must(t, r.unstage("raw"))
			r.stop()
			switch how {
			case "torn", "newer":
				r.spoil("static/devices", how)
			case "missing":
				must(t, os.RemoveAll(r.dir+"/static/devices"))
			case "both torn":
				r.spoil("static/devices", "torn")
				r.spoil("static", "torn")
			}
			r.start()
			part := shell(t, "losetup -f --show -o 1M --sizelimit 32M "+r.dir+"/disk")
			err = r.stage("part", fileSystem("ext4"), part)
			if err == nil {
				t.Errorf("it was formatted: %s", shell(t, "blkid -p "+part))
				must(t, r.unstage("part"))
			} else if !strings.Contains(err.Error(), "is not formatted") {
				t.Error(err)
			}
		})
	}
}

// A volume that is certainly staged keeps its device, whatever records of others are unusable.
func TestA10_ABadRecordTakesNoDeviceFromAStagedVolume(t *testing.T) {
	r := newRig(t)
	device := r.disk("disk", "mkfs.ext4 -q "+r.dir+"/disk")
	must(t, r.stage("a", fileSystem("ext4"), device))
	r.stop()
	r.spoil("state/staged", "newer")
	must(t, os.Rename(r.dir+"/state/staged", r.dir+"/bad"))
	r.start()
	must(t, r.stage("b", fileSystem("ext4"), device))
	target, err := r.publish("b", "pod", fileSystem("ext4"), false, device)
	must(t, err)
	for range 50 { // without the check, chance (the order of a map) would decide
		r.stop()
		shell(t, "cp "+r.dir+"/bad/*.json "+r.dir+"/state/staged/")
		r.start()
		if got := r.inventory(); len(got) != 1 || !slices.Equal(got["b"], []string{target}) {
			t.Fatalf("the pod has %q", got)
		}
	}
	must(t, r.unpublish("b", target))
	must(t, r.unstage("b"))
	must(t, r.unstage("a"))
}

// A stage that a kubelet repeats is refused while the record of the first one cannot be used, or the call asks for something else. The pod
// keeps its device, and no other volume gets it.
func TestA10_ARefusedStageReleasesNoDevice(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{"file system": fileSystem("ext4"), "raw": rawBlock()} {
		for _, how := range []string{"newer", "torn"} {
			t.Run(name+" "+how, func(t *testing.T) {
				r := newRig(t)
				device := r.disk("disk", "mkfs.ext4 -q "+r.dir+"/disk")
				must(t, r.stage("v", capability, device))
				target, err := r.publish("v", "pod", capability, false, device)
				must(t, err)
				r.stop()
				r.spoil("state/staged", how)
				r.start()
				again := capability
				if how == "torn" {
					again = fileSystem("xfs")
				}
				if err := r.stage("v", again, device); err == nil {
					t.Error("it is staged")
				}
				if err := r.stage("other", fileSystem("ext4"), device); err == nil {
					t.Error("two volumes have one device")
					must(t, r.unstage("other"))
				}
				must(t, r.unpublish("v", target))
				must(t, r.unstage("v"))
			})
		}
	}
}

// Two volumes are of one share. Which of them a mount is of is on record, and not guessed if it is not. A share may be written with a slash
// at its end. (A tmpfs of that name stands for the share: what matters is the name that the kernel shows.)
func TestS07_TwoVolumesOfOneShare(t *testing.T) {
	boot, err := mounter.BootID()
	must(t, err)
	for _, recorded := range []bool{false, true} {
		r := newRig(t)
		for id, share := range map[string]string{"a": "/data", "b": "/data/"} {
			must(t, os.MkdirAll(r.staging(id), 0o755))
			_, err := r.d.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: r.staging(id),
				VolumeCapability: fileSystem(""), VolumeContext: map[string]string{"server": "10.0.0.1", "share": share}})
			must(t, err)
			if recorded { // as a publish does
				to := filepath.Join(r.dir, "state/published", record.Name(id, r.dir+"/pod-"+id)+record.Extension)
				must(t, record.Type{Kind: "crust-csi.published", Version: 1}.Write(to, map[string]any{
					"volumeID": id, "bootID": boot, "target": r.dir + "/pod-" + id, "shown": map[string]any{}}))
			}
			shell(t, "mkdir "+r.dir+"/pod-"+id+" && mount -t tmpfs 10.0.0.1:/data "+r.dir+"/pod-"+id)
		}
		for range 2 {
			r.stop()
			r.start()
		}
		for _, id := range []string{"a", "b"} {
			at := r.dir + "/pod-" + id
			if err := r.unstage(id); recorded && (err == nil || !strings.Contains(err.Error(), "still published at "+at)) {
				t.Errorf("unstage of a volume that a pod has: %v", err)
			}
			must(t, r.unpublish(id, at))
			must(t, r.unstage(id))
		}
		if left, err := record.Names(r.dir + "/state/published"); err != nil || len(left) > 0 {
			t.Errorf("records are left: %q, %v", left, err)
		}
	}
}

// D06: mounts of one server share a superblock, though the volumes name the server in two ways. The kernel then shows the first name for
// all. A publish is on record, so each pod can end, and its volume is not unstaged before. (A tmpfs of that name stands for the share.)
func TestD06_AServerWithTwoNames(t *testing.T) {
	boot, err := mounter.BootID()
	must(t, err)
	r := newRig(t)
	for id, server := range map[string]string{"a": "nas", "b": "10.0.0.1"} {
		must(t, os.MkdirAll(r.staging(id), 0o755))
		_, err := r.d.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: r.staging(id),
			VolumeCapability: fileSystem(""), VolumeContext: map[string]string{"server": server, "share": "/data"}})
		must(t, err)
		at := r.dir + "/pod-" + id
		must(t, record.Type{Kind: "crust-csi.published", Version: 1}.Write(
			filepath.Join(r.dir, "state/published", record.Name(id, at)+record.Extension),
			map[string]any{"volumeID": id, "bootID": boot, "target": at, "shown": map[string]any{}}))
		shell(t, "mkdir "+at+" && mount -t tmpfs nas:/data "+at)
	}
	for range 2 {
		r.stop()
		r.start()
	}
	if got := r.inventory(); len(got["a"]) != 1 || len(got["b"]) != 1 {
		t.Errorf("the pods have %q", got)
	}
	for _, id := range []string{"a", "b"} {
		at := r.dir + "/pod-" + id
		if err := r.unstage(id); err == nil || !strings.Contains(err.Error(), "still published at "+at) {
			t.Errorf("unstage of a volume that a pod has: %v", err)
		}
		must(t, r.unpublish(id, at))
		must(t, r.unstage(id))
	}
	// What is no share is still left alone.
	must(t, r.stage("v", rawBlock(), r.disk("disk", "true")))
	at := r.dir + "/pod-v"
	shell(t, "mkdir "+at+" && mount -t tmpfs nas:/data "+at)
	if err := r.unpublish("v", at); err == nil {
		t.Error("another's mount was taken away")
	}
}
