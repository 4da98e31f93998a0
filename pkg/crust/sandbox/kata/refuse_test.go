package kata_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/kata"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

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
		before, _ := filepath.Glob(w.volumes + "/*/*")
		_, err := w.publish(r)
		wants(t, what, err, kind, words)
		if w.busy(d) {
			t.Errorf("%s: the device is held", what)
		}
		if after, _ := filepath.Glob(w.volumes + "/*/*"); !slices.Equal(before, after) {
			t.Errorf("%s: %v before, %v after", what, before, after)
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
	for w.busy(good) { // the kernel closes the files of a process that was killed a moment later
		time.Sleep(time.Millisecond)
	}
	if listed := w.listed("pod").GetVolumes(); len(listed) > 0 {
		t.Errorf("it was refused, and is listed: %v", listed)
	}
	refused("a label", good, fault.Invalid, "no SELinux", func(r *crustv1alpha1.RuntimePublishVolumeRequest) {
		r.MountOptions = []string{"context=system_u:object_r:container_file_t:s0"}
	})
	refused("a path that is too long", good, fault.Invalid, "as long", func(r *crustv1alpha1.RuntimePublishVolumeRequest) {
		r.HostTargetPath += strings.Repeat("/x", 100)
	})
	dir := w.place(w.request("pod", good).GetHostTargetPath())
	for _, foreign := range []string{`{"device":"/dev/other"}`, `{"device":"` + good.Path + `"}`, `{`} {
		check(t, os.MkdirAll(dir, 0o700))
		check(t, os.WriteFile(dir+"/mountInfo.json", []byte(foreign), 0o600))
		refused("another's record", good, fault.Exists, "another record", nil)
		if b, err := os.ReadFile(dir + "/mountInfo.json"); string(b) != foreign {
			t.Errorf("another's record is %q now, %v", b, err)
		}
		check(t, os.RemoveAll(dir))
	}
	check(t, os.MkdirAll(dir, 0o700))
	check(t, os.WriteFile(dir+"/another-sandbox", nil, 0o600))
	check(t, os.MkdirAll(w.boxes+"/another-sandbox", 0o700))
	refused("a place that a sandbox has", good, fault.State, "still has a volume", nil)
	check(t, os.Remove(w.boxes+"/another-sandbox")) // it has ended, and Kata has left its id

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
		{Runtime: kata.Go, FileSystems: []string{w.fs, ""}}, {Runtime: kata.Go, FileSystems: []string{" " + w.fs}}} {
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
	_, err = w.publish(w.request("pod", d, "ro"))
	wants(t, "read-only", err, fault.Invalid, "makes no device read-only")
	r.FsgroupGid = nil
	_, err = w.publish(r)
	check(t, err)
	_, err = w.create("pod", r.GetHostTargetPath())
	check(t, err)
	_, _, err = w.server.Stats(t.Context(), "pod", d.Path)
	wants(t, "statistics", err, fault.State, "no statistics")
	err = w.server.Unpublish(t.Context(), "pod", d.Path)
	wants(t, "a volume that a container may have", err, fault.State, "does not tell whether")
	w.end("pod")
	w.gone("pod")
	if w.busy(d) {
		t.Error("the sandbox has ended, and the device is held")
	}
}

// C19: the process that ended was Kata's shim, and its hypervisor lives on with the device.
func TestC19_KatasHypervisorOutlivesItsShim(t *testing.T) {
	w := newWorld(t, kata.Go)
	d, _, _ := w.pod("pod")
	endHypervisor := opened(t, d.Path, 0)
	w.end("pod")
	time.Sleep(time.Second) // the server looks after 50 ms, and again
	if !w.busy(d) || w.listed("pod") == nil {
		t.Error("the device was let go while the hypervisor has it")
	}
	endHypervisor()
	w.gone("pod")
	if w.busy(d) {
		t.Error("all have ended, and the device is held")
	}
}

// C16, C17: a shim that answers nonsense, or not at all, and growth that only an agent of the future has.
func TestC16_C17_KatasSocket(t *testing.T) {
	w := newWorld(t, kata.Go)
	d, r, enlarge := w.pod("pod")
	_, err := w.create("pod", r.GetHostTargetPath())
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
