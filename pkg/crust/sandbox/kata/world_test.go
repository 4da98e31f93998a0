package kata_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/kata"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wants expects an error of a kind, and words in it.
func wants(t *testing.T, what string, err error, kind fault.Kind, words string) {
	t.Helper()
	if !fault.Is(err, kind) || !strings.Contains(fmt.Sprint(err), words) {
		t.Errorf("%s: %v; want %v with %q", what, err, kind, words)
	}
}

// world is a node with a stand-in for Kata and a CRUST server.
type world struct {
	*standIn
	t       *testing.T
	config  kata.Config
	state   string
	kubelet string
	fs      string
	server  *sandbox.Server
	allow   []string
	ids     []string // of sandboxes
}

func newWorld(t *testing.T, runtime string) *world {
	t.Helper()
	w := &world{standIn: newStandIn(t), t: t, state: t.TempDir()}
	w.rust = runtime == kata.Rust
	kubelet := filepath.Join(t.TempDir(), "kubelet")
	check(t, os.Mkdir(kubelet, 0o750))
	// As on nodes where the kubelet's directory is on another disk. Kata's key has no links.
	w.kubelet = kubelet + "-link"
	check(t, os.Symlink(kubelet, w.kubelet))
	w.config.FileSystems = fileSystems(t)
	w.fs = w.config.FileSystems[0]
	w.config.Runtime, w.config.Volumes, w.config.Sandboxes = runtime, w.volumes, w.boxes
	w.start()
	t.Cleanup(func() {
		w.finish()
		w.server.Stop()
	})
	return w
}

// fileSystems returns those that can be made and mounted here.
func fileSystems(t *testing.T) []string {
	here, err := mounter.Mountable()
	check(t, err)
	return slices.DeleteFunc(fstype.Formats(), func(name string) bool { return !slices.Contains(here, name) })
}

func (w *world) start() {
	w.t.Helper()
	b, err := kata.New(w.config)
	check(w.t, err)
	m, err := sandbox.New(w.t.Context(), sandbox.Config{StateDir: w.state, KubeletDir: w.kubelet, Backend: b, Timeout: time.Minute,
		Devices: sandbox.Devices{Allow: w.allow}})
	check(w.t, err)
	w.server = &sandbox.Server{Manager: m}
}

// sandbox starts one and registers it.
func (w *world) sandbox(id string) {
	w.t.Helper()
	_, err := w.server.RegisterSandbox(w.t.Context(), &crustv1alpha1.RegisterSandboxRequest{SandboxId: id, Pid: int64(w.boot(id))})
	check(w.t, err)
	w.ids = append(w.ids, id)
}

// finish ends all sandboxes.
func (w *world) finish() {
	for _, id := range w.ids {
		w.end(id)
		w.gone(id)
	}
	w.ids = nil
}

func (w *world) listed(id string) *crustv1alpha1.Sandbox {
	w.t.Helper()
	list, err := w.server.ListSandboxes(w.t.Context(), nil)
	check(w.t, err)
	for _, s := range list.GetSandboxes() {
		if s.GetSandboxId() == id {
			return s
		}
	}
	return nil
}

// gone waits until the server has cleaned up after a sandbox.
func (w *world) gone(id string) {
	w.t.Helper()
	for end := time.Now().Add(time.Minute); w.listed(id) != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("%s is still registered", id)
		}
	}
}

// disk returns a device with a file system, and a function that doubles its size.
func (w *world) disk(fs string) (d mounter.Device, enlarge func()) {
	w.t.Helper()
	const size = 320 << 20
	file := filepath.Join(w.t.TempDir(), "disk")
	check(w.t, os.WriteFile(file, nil, 0o600))
	check(w.t, os.Truncate(file, size))
	loops := loopdev.Nodes{Dir: w.t.TempDir()}
	loop, err := loops.Attach(file, false)
	check(w.t, err)
	w.t.Cleanup(func() {
		w.finish()
		check(w.t, loops.Detach(loop))
	})
	w.allow = append(w.allow, loop.Path)
	w.server.Devices.Allow = w.allow
	if fs != "" {
		_, blank, err := superblock.ProveBlank(w.t.Context(), loop.Path, superblock.Reading{})
		check(w.t, err)
		check(w.t, fsprogs.New(nil).Format(w.t.Context(), blank, fs, false))
	}
	return mounter.Device{Path: loop.Path, Major: loop.Major, Minor: loop.Minor}, func() {
		w.t.Helper()
		check(w.t, os.Truncate(file, 2*size))
		check(w.t, loop.SetCapacity())
	}
}

// request asks for a volume of a pod. crust-agent has put a placeholder at the target.
func (w *world) request(id string, d mounter.Device, options ...string) *crustv1alpha1.RuntimePublishVolumeRequest {
	w.t.Helper()
	target := filepath.Join(w.kubelet, "pods", id, filepath.Base(d.Path), "mount")
	check(w.t, os.MkdirAll(target, 0o750))
	return &crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: id, HostVolumeId: d.Path, HostTargetPath: target, FileSystem: w.fs,
		MountOptions: options}
}

func (w *world) publish(r *crustv1alpha1.RuntimePublishVolumeRequest) (pending bool, err error) {
	resp, err := w.server.RuntimePublishVolume(w.t.Context(), r)
	return resp.GetPending(), err
}

func (w *world) busy(d mounter.Device) bool {
	w.t.Helper()
	busy, err := mounter.Busy(d.Path)
	check(w.t, err)
	return busy
}

// has reads a file of a device that nobody has.
func (w *world) has(d mounter.Device, fs, name, text string) {
	w.t.Helper()
	m, err := mounter.Open(mounter.Filesystem{Device: d, Type: fs})
	check(w.t, err)
	defer m.Close()
	dir, err := m.Dir()
	check(w.t, err)
	defer dir.Close()
	if got, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)); err != nil || string(got) != text {
		w.t.Errorf("%s has %q, %v; want %q", name, got, err, text)
	}
}

// pod starts a sandbox that has a volume, which is pending.
func (w *world) pod(id string) (d mounter.Device, r *crustv1alpha1.RuntimePublishVolumeRequest, enlarge func()) {
	w.t.Helper()
	w.sandbox(id)
	d, enlarge = w.disk(w.fs)
	r = w.request(id, d)
	_, err := w.publish(r)
	check(w.t, err)
	return d, r, enlarge
}
