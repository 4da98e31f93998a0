package kata_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/kata"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// C12, C13, C16, C18: the life of a pod's volume, with each file system, in both worlds: what Kata is told, and what is on the device.
func TestC12_C16_KataAPodsVolume(t *testing.T) {
	for _, fs := range fileSystems(t) {
		t.Run(fs, func(t *testing.T) {
			w := newWorld(t, kata.Go)
			w.fs = fs
			id, group := "pod-"+w.fs, uint32(4321)
			w.sandbox(id)
			d, _ := w.disk(w.fs)
			r := w.request(id, d, "noatime")
			r.FsgroupGid, r.FsgroupPolicy = &group, "Always"
			if pending, err := w.publish(r); !pending || err != nil {
				t.Fatalf("pending %v, %v", pending, err)
			}
			if !w.busy(d) {
				t.Error("nobody holds the device")
			}
			info := filepath.Join(w.place(r.GetHostTargetPath()), "mountInfo.json")
			text, err := os.ReadFile(info)
			check(t, err)
			var got map[string]any
			check(t, json.Unmarshal(text, &got))
			options := append([]any{"noatime"}, optionsOf(w.fs)...)
			if want := map[string]any{"volume-type": "directvol", "device": d.Path, "fstype": w.fs, "options": options,
				"metadata": map[string]any{"fsGroup": "4321", "fsGroupChangePolicy": "Always"}}; fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("Kata is told %s", text)
			}
			for path, mode := range map[string]os.FileMode{info: 0o600, filepath.Dir(info): 0o700 | os.ModeDir} {
				if st, err := os.Stat(path); err != nil || st.Mode() != mode {
					t.Errorf("%s: %v %v", path, st.Mode(), err)
				}
			}
			of := &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: id, HostVolumeId: d.Path}
			_, err = w.server.RuntimeGetVolumeStats(t.Context(), of)
			wants(t, "statistics before a container starts", err, fault.Unavailable, "when a container of the sandbox starts")

			root, err := w.create(id, r.GetHostTargetPath())
			check(t, err)
			check(t, os.WriteFile(root+"/f", []byte("from the pod"), 0o644))
			if pending, err := w.publish(r); pending || err != nil {
				t.Errorf("a container has started: pending %v, %v", pending, err)
			}
			stats, err := w.server.RuntimeGetVolumeStats(t.Context(), of)
			check(t, err)
			u, err := w.guests[id].mounts[d.Path].Usage()
			check(t, err)
			if b := stats.GetUsage()[0]; b.GetTotal() != u.TotalBytes || b.GetAvailable() != u.AvailableBytes || b.GetTotal() == 0 {
				t.Errorf("statistics %v, and the guest has %+v", b, u)
			}
			if got := w.listed(id).GetVolumes()[0].GetState(); got != "published" {
				t.Errorf("listed as %s", got)
			}
			_, err = w.server.UnpublishVolume(t.Context(), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: id, HostVolumeId: d.Path})
			wants(t, "a volume in use", err, fault.State, "end the pod")
			if again, err := w.create(id, r.GetHostTargetPath()); err != nil {
				t.Errorf("a second container: %v", err)
			} else if b, err := os.ReadFile(again + "/f"); string(b) != "from the pod" {
				t.Errorf("a second container reads %q, %v", b, err)
			}

			w.end(id)
			w.gone(id)
			if w.busy(d) {
				t.Error("the sandbox has ended, and the device is held")
			}
			if left, err := os.ReadDir(w.volumes); len(left) > 0 || err != nil {
				t.Errorf("%v are left, %v", left, err)
			}
			w.has(d, w.fs, "f", "from the pod")
		})
	}
}

func optionsOf(fs string) (list []any) {
	if o := fstype.Of(fs).Copy; o != "" {
		list = append(list, o)
	}
	return list
}

// R05: a read-only volume is so in Kata's record, and two pods can read it.
func TestR05_KataReadOnly(t *testing.T) {
	w := newWorld(t, kata.Go)
	d, _ := w.disk(w.fs)
	for _, id := range []string{"one", "two"} {
		w.sandbox(id)
		r := w.request(id, d, "ro")
		_, err := w.publish(r)
		check(t, err)
		root, err := w.create(id, r.GetHostTargetPath())
		check(t, err)
		if err := os.WriteFile(root+"/f", nil, 0o600); err == nil {
			t.Error("it can be written to")
		}
	}
	w.sandbox("three")
	_, err := w.publish(w.request("three", d))
	wants(t, "a writer beside readers", err, fault.State, "is in use by sandbox")
	w.end("one")
	w.gone("one")
	if !w.busy(d) {
		t.Error("one reader has ended, and nobody holds the device of the other")
	}
}

// C12: what is pending is taken back, unless Kata has begun with it.
func TestC12_KataTakesBackWhatIsPending(t *testing.T) {
	w := newWorld(t, kata.Go)
	w.sandbox("pod")
	d, _ := w.disk(w.fs)
	r := w.request("pod", d)
	_, err := w.publish(r)
	check(t, err)
	un := &crustv1alpha1.UnpublishVolumeRequest{SandboxId: "pod", HostVolumeId: d.Path}

	end := opened(t, d.Path, 0) // by the hypervisor, which has read the record
	_, err = w.server.UnpublishVolume(t.Context(), un)
	wants(t, "a device that is open", err, fault.State, "is in use in the sandbox")
	if !w.busy(d) {
		t.Error("nobody holds the device that Kata has opened")
	}
	if _, err := w.create("pod", r.GetHostTargetPath()); err != nil {
		t.Errorf("the container that was starting does not start: %v", err)
	}
	end()

	w.sandbox("other")
	e, _ := w.disk(w.fs)
	r = w.request("other", e)
	_, err = w.publish(r)
	check(t, err)
	_, err = w.server.UnpublishVolume(t.Context(), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: "other", HostVolumeId: e.Path})
	check(t, err)
	if w.busy(e) {
		t.Error("it was taken back, and the device is held")
	}
	if _, err := w.create("other", r.GetHostTargetPath()); !errors.Is(err, errShared) {
		t.Errorf("it was taken back, and Kata has %v", err)
	}
}

// opened has another process open a device, until end is called.
func opened(t *testing.T, path string, flags int) (end func()) {
	t.Helper()
	c := exec.Command("sleep", "1000000")
	f, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
	check(t, err)
	c.ExtraFiles = []*os.File{f}
	check(t, c.Start())
	check(t, f.Close())
	end = sync.OnceFunc(func() {
		check(t, c.Process.Kill())
		_ = c.Wait() // it was killed
	})
	t.Cleanup(end)
	return end
}

// C18: a server that starts again holds the devices again, unless the sandbox has ended meanwhile.
func TestC18_KataAServerThatStartsAgain(t *testing.T) {
	w := newWorld(t, kata.Go)
	devices := map[string]mounter.Device{}
	for _, id := range []string{"lives", "ended", "robbed"} {
		w.sandbox(id)
		d, _ := w.disk(w.fs)
		devices[id] = d
		r := w.request(id, d)
		_, err := w.publish(r)
		check(t, err)
		if _, err := w.create(id, r.GetHostTargetPath()); err != nil {
			t.Fatal(err)
		}
	}
	w.server.Stop()
	w.end("ended")
	robber, err := os.OpenFile(devices["robbed"].Path, os.O_RDONLY|os.O_EXCL, 0)
	check(t, err)
	w.start()
	w.gone("ended")
	if w.busy(devices["ended"]) || !w.busy(devices["lives"]) {
		t.Errorf("held: of the one that ended %v, of the one that lives %v", w.busy(devices["ended"]), w.busy(devices["lives"]))
	}
	_, err = w.publish(w.request("robbed", devices["robbed"]))
	wants(t, "a device that somebody else took", err, fault.State, "cannot be reached")
	check(t, robber.Close())
	for end := time.Now().Add(time.Minute); !w.busy(devices["robbed"]); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody holds it again")
		}
	}
}

// C20, C23: what cannot be is refused, and nothing of it is left.
func TestC23_KataRefuses(t *testing.T) {
	w := newWorld(t, kata.Go)
	w.sandbox("pod")
	good, _ := w.disk(w.fs)
	blank, _ := w.disk("")
	refused := func(what string, d mounter.Device, kind fault.Kind, words string, change func(*crustv1alpha1.RuntimePublishVolumeRequest)) {
		t.Helper()
		r := w.request("pod", d)
		if change != nil {
			change(r)
		}
		_, err := w.publish(r)
		wants(t, what, err, kind, words)
		if w.busy(d) {
			t.Errorf("%s: the device is held", what)
		}
		if left, _ := filepath.Glob(w.volumes + "/*/*"); len(left) > 1 {
			t.Errorf("%s: %v are left", what, left)
		}
		if hidden, _ := filepath.Glob(w.volumes + "/.crust*"); len(hidden) > 0 {
			t.Errorf("%s: %v are left", what, hidden)
		}
	}
	refused("a blank device", blank, fault.State, "nothing was changed", nil)
	end := opened(t, good.Path, os.O_EXCL)
	_, err := w.publish(w.request("pod", good))
	wants(t, "a device that somebody else has", err, fault.State, "outside of this sandbox")
	end()
	if listed := w.listed("pod").GetVolumes(); len(listed) > 0 {
		t.Errorf("it was refused, and is listed: %v", listed)
	}
	refused("a label", good, fault.Invalid, "no SELinux", func(r *crustv1alpha1.RuntimePublishVolumeRequest) {
		r.MountOptions = []string{"context=system_u:object_r:container_file_t:s0"}
	})
	refused("a path that is too long", good, fault.Invalid, "as long", func(r *crustv1alpha1.RuntimePublishVolumeRequest) {
		r.HostTargetPath += strings.Repeat("/x", 100)
	})
	refused("another's record", good, fault.Exists, "another volume", func(r *crustv1alpha1.RuntimePublishVolumeRequest) {
		dir := w.place(r.GetHostTargetPath())
		check(t, os.MkdirAll(dir, 0o700))
		check(t, os.WriteFile(dir+"/mountInfo.json", []byte(`{"device":"/dev/other"}`), 0o600))
	})
	dir := w.place(w.request("pod", good).GetHostTargetPath())
	if b, err := os.ReadFile(dir + "/mountInfo.json"); string(b) != `{"device":"/dev/other"}` {
		t.Errorf("another's record is %q now, %v", b, err)
	}
	check(t, os.RemoveAll(dir))
	check(t, os.MkdirAll(dir+"/another-sandbox", 0o700))
	refused("a place that a sandbox has", good, fault.State, "still has a volume", nil)
	check(t, os.RemoveAll(dir))

	r := w.request("pod", good)
	_, err = w.publish(r)
	check(t, err)
	_, err = w.server.ResolveMount(t.Context(), &crustv1alpha1.ResolveMountRequest{SandboxId: "pod", Source: r.GetHostTargetPath()})
	check(t, err)
	if _, err := w.create("pod", r.GetHostTargetPath()); err != nil {
		t.Fatal(err)
	}
	_, _, err = w.server.Stats(t.Context(), "pod", good.Path) // so that it is pending no longer
	check(t, err)
	_, _, err = w.server.Resolve(t.Context(), "pod", r.GetHostTargetPath()+"/sub")
	wants(t, "a sub-path", err, fault.State, "only all of it")
	_, err = w.server.RegisterSandbox(t.Context(), &crustv1alpha1.RegisterSandboxRequest{SandboxId: "no-process"})
	wants(t, "a sandbox without a process", err, fault.Invalid, "pid is missing")
	for _, c := range []kata.Config{{Runtime: "c", FileSystems: []string{w.fs}}, {Runtime: kata.Go}, {FileSystems: []string{w.fs}},
		{Runtime: kata.Go, FileSystems: []string{w.fs, ""}}} {
		_, err := kata.New(c)
		wants(t, fmt.Sprint(c), err, fault.Invalid, "")
	}
}

// C11, C16: Kata's runtime in Rust does less, and the server says so.
func TestC11_KataInRust(t *testing.T) {
	w := newWorld(t, kata.Rust)
	caps, err := w.server.RuntimeGetCapabilities(t.Context(), nil)
	check(t, err)
	if len(caps.GetCapabilities()) > 0 {
		t.Errorf("%v", caps.GetCapabilities())
	}
	w.sandbox("pod")
	d, _ := w.disk(w.fs)
	r, group := w.request("pod", d), uint32(1)
	r.FsgroupGid = &group
	_, err = w.publish(r)
	wants(t, "a group", err, fault.Invalid, "gives no volume to a group")
	r.FsgroupGid = nil
	_, err = w.publish(r)
	check(t, err)
	_, err = w.create("pod", r.GetHostTargetPath())
	check(t, err)
	if pending, err := w.publish(r); pending || err != nil {
		t.Errorf("a container has started: pending %v, %v", pending, err)
	}
	_, _, err = w.server.Stats(t.Context(), "pod", d.Path)
	wants(t, "statistics", err, fault.State, "no statistics")
}

// C16, C17: a shim that answers nonsense, or not at all, and growth that only an agent of the future has.
func TestC16_C17_KatasSocket(t *testing.T) {
	w := newWorld(t, kata.Go)
	w.sandbox("pod")
	d, enlarge := w.disk(w.fs)
	r := w.request("pod", d)
	_, err := w.publish(r)
	check(t, err)
	_, err = w.create("pod", r.GetHostTargetPath())
	check(t, err)
	for answer, words := range map[string]string{
		"{":                                 "cannot be read",
		"{}":                                "no size",
		`{"usage":[{"total":-1,"unit":1}]}`: "cannot be read",
		`{"usage":[{"total":9223372036854775808,"unit":1}]}`: "no volume has",
	} {
		w.answer = answer
		_, _, err := w.server.Stats(t.Context(), "pod", d.Path)
		wants(t, answer, err, fault.State, words)
	}
	w.answer = `{"usage":[{"total":10,"used":3,"unit":1}],"volume_condition":{"abnormal":true,"message":"ill\u0007"}}`
	if u, ailment, err := w.server.Stats(t.Context(), "pod", d.Path); u.UsedBytes != 3 || !strings.HasPrefix(ailment, "ill") ||
		strings.Contains(ailment, "\a") || err != nil {
		t.Errorf("%+v %q %v", u, ailment, err)
	}
	enlarge()
	_, err = w.server.Expand(t.Context(), "pod", d.Path, 0)
	wants(t, "growth", err, fault.State, "Unimplemented")
	w.grows = true
	_, err = w.server.Expand(t.Context(), "pod", d.Path, 0)
	check(t, err)
	check(t, os.Remove(filepath.Join(w.boxes, "pod", "shim-monitor.sock")))
	_, _, err = w.server.Stats(t.Context(), "pod", d.Path)
	wants(t, "a shim that is away", err, fault.Unavailable, "does not answer")
}
