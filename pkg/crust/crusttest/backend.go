package crusttest

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Kit describes a backend to TestBackend.
type Kit struct {
	// Open opens the backend whose state is in dir. TestBackend closes it and opens it again, as a
	// restarted server does.
	Open func(t testing.TB, dir, kubeletDir string) sandbox.Backend
	// Sandbox starts a sandbox and returns its registration without an id.
	Sandbox func(t testing.TB) *crustv1alpha1.RegisterSandboxRequest
	// Write creates a file in a sandbox and Read returns its content. The path is as programs in
	// the sandbox see it. The sandbox is as ListSandboxes reports it.
	Write func(s *sandbox.Server, in *crustv1alpha1.Sandbox, path, text string) error
	Read  func(s *sandbox.Server, in *crustv1alpha1.Sandbox, path string) (string, error)
	// Start starts a container in a sandbox, for a backend whose volumes are pending until then: see sandbox.Place. It is nil if
	// every volume is mounted at once.
	Start func(t testing.TB, id string)
	// NoSlots: its sandboxes are no sandbox.Binder.
	NoSlots bool
	// Patience bounds each answer of a sandbox. 0 is a minute.
	Patience time.Duration
}

// TestBackend runs a pod's life against a backend through a CRUST server. It checks the result in
// the sandbox and on the host. It needs root.
func TestBackend(t *testing.T, kit Kit) {
	kit.Patience = cmp.Or(kit.Patience, time.Minute)
	b := newBackendSuite(t, kit)
	b.start()
	t.Cleanup(b.stop)
	b.register("one")
	b.register("two")
	b.findFileSystem()
	for _, part := range []struct {
		name string
		test func(*backendSuite, *testing.T)
	}{
		{"C11_CapabilitiesAndFileSystems", (*backendSuite).says},
		{"C20_RegistrationsThatAreWrong", (*backendSuite).wrongRegistrations},
		{"C13_APodsVolume", (*backendSuite).lives},
		{"C12_WhatIsPendingIsTakenBack", (*backendSuite).takenBack},
		{"C19_OneDeviceOneSandbox", (*backendSuite).oneSandbox},
		{"R05_ReadOnly", (*backendSuite).readOnly},
		{"C15_PathsStayInTheVolume", (*backendSuite).paths},
		{"C24_SlotsOfContainersThatRun", (*backendSuite).slots},
		{"C17_ItGrows", (*backendSuite).grows},
		{"C23_WhatCannotBeMounted", (*backendSuite).cannot},
		{"C18_AServerThatStartsAgain", (*backendSuite).again},
		{"C18_ASandboxThatIsDeregistered", (*backendSuite).leaves},
	} {
		t.Run(part.name, func(t *testing.T) { part.test(b, t) })
	}
}

type backendSuite struct {
	Kit
	t       testing.TB
	dir     string
	kubelet string
	fs      string
	backend sandbox.Backend
	server  *sandbox.Server
	disks   []string
	made    map[string]*crustv1alpha1.RegisterSandboxRequest
}

func newBackendSuite(t *testing.T, kit Kit) *backendSuite {
	b := &backendSuite{Kit: kit, t: t, dir: t.TempDir(), made: map[string]*crustv1alpha1.RegisterSandboxRequest{}}
	b.kubelet = filepath.Join(t.TempDir(), "kubelet")
	fatal(t, os.MkdirAll(b.kubelet, 0o750))
	return b
}

func fatal(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (b *backendSuite) ctx() context.Context { return context.Background() }

// start does what a starting server does.
func (b *backendSuite) start() {
	b.t.Helper()
	b.backend = b.Open(b.t, b.dir, b.kubelet)
	m, err := sandbox.New(b.ctx(), sandbox.Config{
		StateDir: b.dir, KubeletDir: b.kubelet, Backend: b.backend, Timeout: b.Patience, OwnershipTimeout: b.Patience,
		Devices: sandbox.Devices{Allow: b.disks},
	})
	fatal(b.t, err)
	b.server = &sandbox.Server{Manager: m}
}

// stop ends the server and closes the backend. Its sandboxes go on.
func (b *backendSuite) stop() { b.server.Stop() }

func (b *backendSuite) register(id string) {
	b.t.Helper()
	r := b.Sandbox(b.t)
	r.SandboxId = id
	_, err := b.server.RegisterSandbox(b.ctx(), r)
	fatal(b.t, err)
	b.made[id] = r
	b.t.Cleanup(func() {
		if err := b.server.Deregister(b.ctx(), id); err != nil {
			b.t.Errorf("deregister %s: %v", id, err)
		}
	})
}

// findFileSystem finds one that can be made here and mounted there.
func (b *backendSuite) findFileSystem() {
	b.t.Helper()
	var list []string
	for end := time.Now().Add(b.Patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) { // a guest may be booting
		var err error
		list, err = b.backend.FileSystems(b.ctx())
		fatal(b.t, err)
		for _, name := range fstype.Formats() {
			if slices.Contains(list, name) {
				b.fs = name
				return
			}
		}
	}
	b.t.Fatalf("within %s, none of %v is among what its sandboxes mount: %v", b.Patience, fstype.Formats(), list)
}

// in returns what the server reports of a sandbox; nil if it knows none.
func (b *backendSuite) in(t testing.TB, id string) *crustv1alpha1.Sandbox {
	t.Helper()
	list, err := b.server.ListSandboxes(b.ctx(), nil)
	fatal(t, err)
	for _, s := range list.GetSandboxes() {
		if s.GetSandboxId() == id {
			return s
		}
	}
	return nil
}

// diskSize, in bytes, is enough for every file system. The files are sparse.
var diskSize = fstype.LargestMinimum()

// disk returns a blank device, and a function that doubles its size. The test's cleanup releases
// it.
func (b *backendSuite) disk(t testing.TB) (d mounter.Device, enlarge func()) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "disk")
	fatal(t, os.WriteFile(file, nil, 0o600))
	fatal(t, os.Truncate(file, diskSize))
	loops := loopdev.Nodes{Dir: t.TempDir()}
	loop, err := loops.Attach(file, false)
	fatal(t, err)
	t.Cleanup(func() {
		if err := loops.Detach(loop); err != nil {
			t.Errorf("detach %s: %v", loop.Path, err)
		}
	})
	b.disks = append(b.disks, loop.Path)
	b.server.Devices.Allow = b.disks
	return mounter.Device{Path: loop.Path, Major: loop.Major, Minor: loop.Minor}, func() {
		t.Helper()
		fatal(t, os.Truncate(file, 2*diskSize))
		fatal(t, loop.SetCapacity())
	}
}

func (b *backendSuite) formatted(t testing.TB) (d mounter.Device, enlarge func()) {
	t.Helper()
	d, enlarge = b.disk(t)
	b.format(t, d)
	return d, enlarge
}

func (b *backendSuite) format(t testing.TB, d mounter.Device) {
	t.Helper()
	_, blank, err := superblock.ProveBlank(b.ctx(), d.Path, superblock.Reading{})
	fatal(t, err)
	fatal(t, fsprogs.New(nil).Format(b.ctx(), blank, b.fs, false))
}

// volume returns a volume whose target's parent exists.
func (b *backendSuite) volume(d mounter.Device, pod string) sandbox.Volume {
	b.t.Helper()
	dir := filepath.Join(b.kubelet, "pods", pod)
	fatal(b.t, os.MkdirAll(dir, 0o750))
	return sandbox.Volume{Device: d, Target: filepath.Join(dir, "mount"), Type: b.fs}
}

// publish publishes a volume. If it is pending, it starts the container that mounts it.
func (b *backendSuite) publish(t testing.TB, id string, v sandbox.Volume) error {
	t.Helper()
	isPending, err := b.ask(id, v)
	if err != nil || !isPending {
		return err
	}
	where := b.waits(t, id, v)
	b.Start(t, id)
	if b.supports(crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS) {
		_, _, err := b.server.Stats(b.ctx(), id, v.Device.Path)
		fatal(t, err)
		for _, listed := range b.in(t, id).GetVolumes() {
			if listed.GetHostVolumeId() == v.Device.Path && listed.GetState() != crust.StatePublished {
				t.Errorf("%s has stats and is listed as %s", v.Device.Path, listed.GetState())
			}
		}
	}
	if isPending, err = b.ask(id, v); err == nil && isPending {
		t.Errorf("%s is pending in %s although its container has started", v.Device.Path, id)
	}
	if now := b.path(t, id, v.Target); now != where {
		t.Errorf("%s in %s was to be at %s and is at %s", v.Device.Path, id, where, now)
	}
	return err
}

func (b *backendSuite) ask(id string, v sandbox.Volume) (isPending bool, err error) {
	r := &crustv1alpha1.RuntimePublishVolumeRequest{
		SandboxId: id, HostVolumeId: v.Device.Path, HostTargetPath: v.Target, FileSystem: v.Type,
	}
	if v.ReadOnly {
		r.MountOptions = []string{"ro"}
	}
	resp, err := b.server.RuntimePublishVolume(b.ctx(), r)
	return resp.GetPending(), err
}

// waits expects that a volume is pending. It returns where it will be.
func (b *backendSuite) waits(t testing.TB, id string, v sandbox.Volume) string {
	t.Helper()
	if b.Start == nil {
		t.Fatalf("%s is pending in %s; give a Start that starts its container", v.Device.Path, id)
	}
	if busy, err := mounter.Busy(v.Device.Path); !busy || err != nil {
		t.Errorf("%s is pending in %s and nobody holds it (%v): it could be given to others", v.Device.Path, id, err)
	}
	_, _, err := b.server.Resolve(b.ctx(), id, v.Target+"/sub")
	wants(t, "a directory of a volume that is not mounted yet", err, fault.State)
	for _, listed := range b.in(t, id).GetVolumes() {
		if listed.GetHostVolumeId() == v.Device.Path && listed.GetState() != crust.StatePending {
			t.Errorf("%s is listed as %s", v.Device.Path, listed.GetState())
		}
	}
	if b.supports(crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS) {
		_, _, err := b.server.Stats(b.ctx(), id, v.Device.Path)
		wants(t, "stats of a volume that is pending", err, fault.Unavailable)
	}
	if b.backend.Grows(v.Type) && !v.ReadOnly {
		_, err := b.server.Expand(b.ctx(), id, v.Device.Path, 0)
		wants(t, "growth of a volume that is pending", err, fault.Unavailable)
	}
	return b.path(t, id, v.Target)
}

// published publishes a volume until the test ends.
func (b *backendSuite) published(t testing.TB, id string, v sandbox.Volume) {
	t.Helper()
	fatal(t, b.publish(t, id, v))
	t.Cleanup(func() {
		if err := b.server.Unpublish(b.ctx(), id, v.Device.Path); err != nil {
			t.Errorf("unpublish: %v", err)
		}
	})
}

// path returns where a container of the sandbox finds a path of the host.
func (b *backendSuite) path(t testing.TB, id, source string) string {
	t.Helper()
	path, foreign, err := b.server.Resolve(b.ctx(), id, source)
	if err != nil || foreign || path == "" {
		t.Fatalf("%s in %s is at %q, %v, %v", source, id, path, foreign, err)
	}
	return path
}

func (b *backendSuite) put(t testing.TB, id, source, text string) {
	t.Helper()
	fatal(t, b.Write(b.server, b.in(t, id), b.path(t, id, filepath.Dir(source))+"/"+filepath.Base(source), text))
}

func (b *backendSuite) has(t testing.TB, id, source, text string) {
	t.Helper()
	got, err := b.Read(b.server, b.in(t, id), b.path(t, id, source))
	if err != nil || got != text {
		t.Errorf("%s in %s has %q, %v; want %q", source, id, got, err, text)
	}
}

// wants expects an error of one of the kinds.
func wants(t testing.TB, what string, err error, kinds ...fault.Kind) {
	t.Helper()
	if !slices.ContainsFunc(kinds, func(k fault.Kind) bool { return fault.Is(err, k) }) {
		t.Errorf("%s: %v; want one of %v", what, err, kinds)
	}
}

// free expects that nobody uses the device.
func free(t testing.TB, d mounter.Device) {
	t.Helper()
	if busy, err := mounter.Busy(d.Path); busy || err != nil {
		t.Errorf("%s is in use, %v%s", d.Path, err, mounter.HeldBy(d).After("; "))
	}
}
