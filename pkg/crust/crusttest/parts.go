package crusttest

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// says: the driver's offers to sandboxes follow from these answers.
func (b *backendSuite) says(t *testing.T) {
	list, err := b.backend.FileSystems(b.ctx())
	fatal(t, err)
	for _, name := range list {
		if !b.backend.Mounts(name) {
			t.Errorf("%s is mounted and is not", name)
		}
	}
	if b.backend.Mounts("nofs") {
		t.Error("an unknown file system is mounted")
	}
	if b.backend.Kind() == "" {
		t.Error("it is of no kind")
	}
	if caps := b.backend.Capabilities(); !slices.Contains(caps, crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS) {
		t.Logf("no stats: %v", caps)
	}
}

func (b *backendSuite) supports(c crust.Capability) bool {
	return slices.Contains(b.backend.Capabilities(), c)
}

// wrongRegistrations leave nothing behind.
func (b *backendSuite) wrongRegistrations(t *testing.T) {
	again := b.made["one"]
	if _, err := b.server.RegisterSandbox(b.ctx(), again); err != nil {
		t.Errorf("a repeated registration: %v", err)
	}
	// An orchestrator knows the sandbox by its id and its process.
	byID := &crustv1alpha1.RegisterSandboxRequest{SandboxId: "one", Pid: again.GetPid()}
	if _, err := b.server.RegisterSandbox(b.ctx(), byID); err != nil {
		t.Errorf("a repeated registration that leaves the kind to the server: %v", err)
	}
	newer := &crustv1alpha1.RegisterSandboxRequest{SandboxId: "three"}
	newer.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 100, protowire.BytesType), nil))
	for what, r := range map[string]*crustv1alpha1.RegisterSandboxRequest{
		"a kind of a later version":   newer,
		"no id":                       {},
		"an id with a slash":          {SandboxId: "../one"},
		"a negative process":          {SandboxId: "three", Pid: -1},
		"a process that is not there": {SandboxId: "three", Pid: 1 << 30, Kind: again.GetKind()},
	} {
		if _, err := b.server.RegisterSandbox(b.ctx(), r); err == nil {
			t.Errorf("registered with %s", what)
		}
	}
	if list, err := b.server.ListSandboxes(b.ctx(), nil); err != nil || len(list.GetSandboxes()) != 2 {
		t.Errorf("the sandboxes are %v, %v", list, err)
	}
	fatal(t, b.server.Deregister(b.ctx(), "three"))
}

// lives: a pod's data is on the device, and the host has mounted nothing.
func (b *backendSuite) lives(t *testing.T) {
	d, _ := b.formatted(t)
	v := b.volume(d, "lives")
	for range 2 {
		fatal(t, b.publish(t, "one", v))
	}
	b.put(t, "one", v.Target+"/f", "written")
	b.has(t, "one", v.Target+"/f", "written")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	fatal(t, err)
	if strings.Contains(string(mounts), fmt.Sprintf(" %d:%d ", d.Major, d.Minor)) || strings.Contains(string(mounts), v.Target) {
		t.Error("the host has it mounted")
	}
	if u, ailment, err := b.server.Stats(b.ctx(), "one", d.Path); b.supports(crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS) &&
		(err != nil || ailment != "" || u.TotalBytes < diskSize/2 || u.TotalBytes > diskSize || u.UsedBytes <= 0 || u.AvailableBytes <= 0) {
		t.Errorf("it is %+v full, %q, %v", u, ailment, err)
	}
	for range 2 {
		fatal(t, b.server.Unpublish(b.ctx(), "one", d.Path))
	}
	free(t, d)
	if _, foreign, err := b.server.Resolve(b.ctx(), "one", v.Target); err != nil || !foreign {
		t.Errorf("a volume that was taken away is resolved: %v, %v", foreign, err)
	}
	b.published(t, "two", v)
	b.has(t, "two", v.Target+"/f", "written")
}

// takenBack: the container that starts later does not get the volume, but another sandbox may.
func (b *backendSuite) takenBack(t *testing.T) {
	d, _ := b.formatted(t)
	v := b.volume(d, "back")
	isPending, err := b.ask("one", v)
	fatal(t, err)
	if isPending {
		b.waits(t, "one", v)
		_, err = b.ask("two", v)
		wants(t, "a device that is pending in another sandbox", err, fault.State)
	}
	fatal(t, b.server.Unpublish(b.ctx(), "one", d.Path))
	if b.Start != nil {
		b.Start(t, "one")
	}
	free(t, d)
	if list := b.in(t, "one").GetVolumes(); len(list) > 0 {
		t.Errorf("sandbox one has %v", list)
	}
	b.published(t, "two", v)
	b.put(t, "two", v.Target+"/f", "of another")
	b.has(t, "two", v.Target+"/f", "of another")
}

// oneSandbox: two kernels, or two mounts, would destroy a file system.
func (b *backendSuite) oneSandbox(t *testing.T) {
	d, _ := b.formatted(t)
	v := b.volume(d, "once")
	b.published(t, "one", v)
	wants(t, "a device that another sandbox has", b.publish(t, "two", v), fault.State)
	elsewhere := v
	elsewhere.Target += "2"
	wants(t, "a device at another target", b.publish(t, "one", elsewhere), fault.Exists)
	other, _ := b.formatted(t)
	wants(t, "a target that another device has", b.publish(t, "one", b.volume(other, "once")), fault.State)
	b.put(t, "one", v.Target+"/f", "whole")
	b.has(t, "one", v.Target+"/f", "whole")
}

// readOnly: nobody writes, so two may read.
func (b *backendSuite) readOnly(t *testing.T) {
	d, _ := b.formatted(t)
	v := b.volume(d, "reads")
	fatal(t, b.publish(t, "one", v))
	b.put(t, "one", v.Target+"/f", "kept")
	fatal(t, b.server.Unpublish(b.ctx(), "one", d.Path))
	v.ReadOnly = true
	for _, id := range []string{"one", "two"} {
		b.published(t, id, v)
		b.has(t, id, v.Target+"/f", "kept")
		if err := b.Write(b.server, b.in(t, id), b.path(t, id, v.Target)+"/f", "changed"); err == nil {
			t.Errorf("%s wrote to a volume that is read-only", id)
		}
	}
	b.has(t, "one", v.Target+"/f", "kept")
	// The device stays claimed for the reader that is left.
	fatal(t, b.server.Unpublish(b.ctx(), "one", d.Path))
	b.has(t, "two", v.Target+"/f", "kept")
	v.ReadOnly = false
	wants(t, "a writer beside a reader", b.publish(t, "one", v), fault.State)
	if busy, err := mounter.Busy(d.Path); !busy || err != nil {
		t.Errorf("the device of a reader is in use: %v, %v", busy, err)
	}
	fatal(t, b.server.Unpublish(b.ctx(), "two", d.Path))
	free(t, d)
}

// paths: a container gets only paths inside the volume.
func (b *backendSuite) paths(t *testing.T) {
	d, _ := b.formatted(t)
	v := b.volume(d, "paths")
	b.published(t, "one", v)
	b.put(t, "one", v.Target+"/f", "inside")
	b.has(t, "one", v.Target+"/./f", "inside")
	none := []string{v.Target + "/f/none"}
	if b.supports(crustv1alpha1.RuntimeCapability_RPC_SUBPATH) { // what is missing is made, as a kubelet makes it
		b.put(t, "one", v.Target+"/new/dir/f", "made")
		b.has(t, "one", v.Target+"/new/dir/f", "made")
	} else {
		none = append(none, v.Target+"/none")
	}
	for _, source := range none {
		if path, _, err := b.server.Resolve(b.ctx(), "one", source); err == nil {
			t.Errorf("%s is at %s", source, path)
		}
	}
	for _, source := range []string{v.Target + "/..", v.Target + "2", "/", "/etc/passwd", v.Target + "/../../f"} {
		if path, foreign, err := b.server.Resolve(b.ctx(), "one", source); err != nil || !foreign || path != "" {
			t.Errorf("%s is at %q, %v, %v; it is none of the volume's", source, path, foreign, err)
		}
	}
}

// grows: online, with its device.
func (b *backendSuite) grows(t *testing.T) {
	if !b.supports(crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE) {
		t.Log("it does not grow volumes, and says so")
		return
	}
	d, enlarge := b.formatted(t)
	v := b.volume(d, "grows")
	b.published(t, "one", v)
	b.put(t, "one", v.Target+"/f", "kept")
	_, err := b.server.Expand(b.ctx(), "one", d.Path, 2*diskSize)
	wants(t, "more than the device has", err, fault.OutOfRange)
	enlarge()
	if n, err := b.server.Expand(b.ctx(), "one", d.Path, 2*diskSize); err != nil || n != 2*diskSize {
		t.Errorf("it grew to %d, %v", n, err)
	}
	if u, _, err := b.server.Stats(b.ctx(), "one", d.Path); err != nil || u.TotalBytes <= diskSize {
		t.Errorf("its kernel says %+v, %v", u, err)
	}
	b.has(t, "one", v.Target+"/f", "kept")
}

// cannot: no file system, or an unsupported one, is refused and the device is released.
func (b *backendSuite) cannot(t *testing.T) {
	d, _ := b.disk(t)
	v := b.volume(d, "blank")
	if err := b.publish(t, "one", v); err == nil {
		t.Error("a device with nothing on it is mounted")
	}
	free(t, d)
	v.Type = "nofs"
	wants(t, "a file system that there is none of", b.publish(t, "one", v), fault.Invalid)
	free(t, d)
	if n := len(b.in(t, "one").GetVolumes()); n != 0 {
		t.Errorf("%d volumes are left", n)
	}
	v.Type = b.fs
	b.format(t, d)
	b.published(t, "one", v)
	b.put(t, "one", v.Target+"/f", "now")
	b.has(t, "one", v.Target+"/f", "now")
	_, _, err := b.server.Stats(b.ctx(), "one", "/dev/none")
	wants(t, "stats of what was not published", err, fault.NotFound)
	_, _, err = b.server.Stats(b.ctx(), "none", d.Path)
	wants(t, "stats of a sandbox that there is none of", err, fault.NotFound)
}

// again: volumes survive a server restart.
func (b *backendSuite) again(t *testing.T) {
	d, _ := b.formatted(t)
	v := b.volume(d, "again")
	b.published(t, "one", v)
	b.put(t, "one", v.Target+"/f", "kept")
	b.stop()
	b.start()
	if in := b.in(t, "one"); in == nil || len(in.GetVolumes()) != 1 || in.GetVolumes()[0].GetHostVolumeId() != d.Path {
		t.Fatalf("after a restart sandbox one is %v", in)
	}
	b.has(t, "one", v.Target+"/f", "kept")
	fatal(t, b.publish(t, "one", v))
	wants(t, "a device that another sandbox has", b.publish(t, "two", v), fault.State)
	b.put(t, "one", v.Target+"/g", "more")
	b.has(t, "one", v.Target+"/g", "more")
}

// leaves: a deregistered sandbox keeps nothing.
func (b *backendSuite) leaves(t *testing.T) {
	defer func(was testing.TB) { b.t = was }(b.t)
	b.t = t
	b.register("three")
	d, _ := b.formatted(t)
	v := b.volume(d, "leaves")
	fatal(t, b.publish(t, "three", v))
	b.put(t, "three", v.Target+"/f", "kept")
	for range 2 {
		fatal(t, b.server.Deregister(b.ctx(), "three"))
	}
	free(t, d)
	if b.in(t, "three") != nil {
		t.Error("it is listed")
	}
	_, _, err := b.server.Resolve(b.ctx(), "three", v.Target)
	wants(t, "a path in a sandbox that is gone", err, fault.NotFound)
	b.published(t, "two", v)
	b.has(t, "two", v.Target+"/f", "kept")
}
