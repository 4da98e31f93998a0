package skew

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// fleet is the volumes that one csi-node version made.
type fleet struct {
	t        *testing.T
	n        *testnode.Node
	name     string
	pods     map[string]*pod
	snapshot string        // of thin
	deferred deferredToPod // to a pod's runtime
}

// kinds are the volumes of a fleet, with their class's parameters.
var kinds = []struct {
	name       string
	v          csiclient.Volume
	parameters map[string]string
	ro         bool
}{
	{name: "ext4", v: csiclient.Volume{FSType: "ext4", Group: "2000", MountFlags: []string{"noatime"}}},
	{name: "thin", v: csiclient.Volume{FSType: "xfs"}},
	{name: "thick", v: csiclient.Volume{FSType: "xfs"}, parameters: map[string]string{"provisioning": "thick"}},
	{name: "idmap", v: csiclient.Volume{FSType: "ext4", Group: "3000"}, parameters: map[string]string{"fsGroupStrategy": "idmap"}},
	{name: "reader", v: csiclient.Volume{FSType: "ext4"}, parameters: map[string]string{"recursiveReadOnly": "Enabled"}, ro: true},
	{name: "block", v: csiclient.Volume{Block: true}},
}

var mayBeDeferred = map[string]string{"allowRuntimeAssistedMount": "true"}

// newFleet makes volumes, gives them to pods, takes a snapshot and restores it.
func newFleet(t *testing.T, n *testnode.Node, name string, seed uint64) *fleet {
	t.Helper()
	f := &fleet{t: t, n: n, name: name, pods: map[string]*pod{}}
	for i, k := range kinds {
		p := &pod{t: t, n: n, name: name + "-" + k.name, v: k.v, ro: k.ro, size: size, seed: seed + uint64(i)}
		made, err := n.Client.Create(ctxOf(t), p.name, size, p.v, k.parameters, nil)
		ok(t, err)
		p.v.ID, p.v.Context = made.GetVolumeId(), made.GetVolumeContext()
		ok(t, n.Client.Stage(ctxOf(t), p.v))
		if k.ro { // data to read
			first := &pod{t: t, n: n, name: p.name, v: p.v, size: size, seed: p.seed}
			first.begin()
			first.end()
			p.written.Store(first.written.Load())
		}
		p.begin()
		f.pods[k.name] = p
	}
	f.snap("thin")
	f.restore("thin", "restored")
	f.deferred = deferOne(t, n, name+"-deferred")
	return f
}

// snap takes a snapshot of a pod's volume.
func (f *fleet) snap(of string) {
	f.t.Helper()
	r, err := f.n.Client.CreateSnapshot(ctxOf(f.t), &csi.CreateSnapshotRequest{Name: f.name, SourceVolumeId: f.pods[of].v.ID})
	ok(f.t, err)
	f.snapshot = r.GetSnapshot().GetSnapshotId()
}

// restore makes a volume of the snapshot, for a pod that only reads. It has some of the origin's
// data.
func (f *fleet) restore(of, name string) {
	f.t.Helper()
	origin := f.pods[of]
	p := &pod{t: f.t, n: f.n, name: f.name + "-" + name, v: csiclient.Volume{FSType: origin.v.FSType}, ro: true, seed: origin.seed}
	made, err := f.n.Client.Create(ctxOf(f.t), p.name, size, p.v, nil, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: f.snapshot}}})
	ok(f.t, err)
	p.v.ID, p.v.Context, p.size = made.GetVolumeId(), made.GetVolumeContext(), made.GetCapacityBytes()
	ok(f.t, f.n.Client.Stage(ctxOf(f.t), p.v))
	p.begin()
	st, err := os.Stat(p.file)
	ok(f.t, err)
	p.written.Store(st.Size() / blockSize)
	if p.written.Load() == 0 {
		f.t.Errorf("%s has nothing of what was written before the snapshot", p.name)
	}
	p.check()
	f.pods[name] = p
}

// use checks that all of its pods continue.
func (f *fleet) use() {
	f.t.Helper()
	for _, p := range f.pods {
		p.use()
	}
	f.deferred.goesOn()
}

// change does what changes volumes: growth, other snapshots, the next pod.
func (f *fleet) change(round string) {
	f.t.Helper()
	for _, name := range []string{"ext4", "thin", "thick", "block"} {
		f.pods[name].grow()
	}
	for _, name := range []string{"ext4", "thick", "idmap", "reader", "block"} {
		f.pods[name].again() // this grows an ext4, too
	}
	// The previous version took the snapshot: it can be restored, and retaken under its name.
	f.restore("thin", round)
	f.pods["restored"].remove()
	f.pods["restored"] = f.pods[round]
	delete(f.pods, round)
	_, err := f.n.Client.DeleteSnapshot(ctxOf(f.t), &csi.DeleteSnapshotRequest{SnapshotId: f.snapshot})
	ok(f.t, err)
	f.snap("thin")
	f.deferred.again()
}

// remove ends all of it.
func (f *fleet) remove() {
	f.t.Helper()
	for _, p := range f.pods {
		p.remove()
	}
	_, err := f.n.Client.DeleteSnapshot(ctxOf(f.t), &csi.DeleteSnapshotRequest{SnapshotId: f.snapshot})
	ok(f.t, err)
	f.deferred.remove()
}

// deferredToPod is a volume that csi-node has left to a runtime.
type deferredToPod struct {
	t      *testing.T
	n      *testnode.Node
	name   string
	v      csiclient.Volume
	answer crust.MountInfo
}

func deferOne(t *testing.T, n *testnode.Node, name string) deferredToPod {
	t.Helper()
	v := csiclient.Volume{FSType: "ext4", Context: mayBeDeferred, MountFlags: []string{"noatime"}}
	made, err := n.Client.Create(ctxOf(t), name, size, v, nil, nil)
	ok(t, err)
	v.ID = made.GetVolumeId()
	ok(t, n.Client.Stage(ctxOf(t), v))
	d := deferredToPod{t: t, n: n, name: name, v: v}
	d.answer = d.publish()
	return d
}

// publish is NodePublishVolume for a runtime whose sandboxes have this kernel.
func (d deferredToPod) publish() crust.MountInfo {
	d.t.Helper()
	target := d.n.Target(d.name)
	ok(d.t, os.MkdirAll(filepath.Dir(target), 0o750))
	req := &csi.NodePublishVolumeRequest{
		VolumeId: d.v.ID, StagingTargetPath: d.n.Client.StagingPath(d.v.ID), TargetPath: target, VolumeCapability: d.v.Capability(),
		VolumeContext: map[string]string{"allowRuntimeAssistedMount": "true", "csi.crust.dev/runtimeKernel": "host"},
	}
	ok(d.t, crust.SetSupportedFilesystems(req, []string{"ext4"}))
	resp, err := d.n.Client.NodePublishVolume(ctxOf(d.t), req)
	ok(d.t, err)
	info, deferred, err := crust.MountInfoOf(resp)
	ok(d.t, err)
	if !deferred {
		d.t.Errorf("%s was not deferred", d.name)
	}
	return info
}

// goesOn checks that it is deferred as before, and given to nobody else.
func (d deferredToPod) goesOn() {
	d.t.Helper()
	ok(d.t, d.n.Client.Stage(ctxOf(d.t), d.v))
	if now := d.publish(); fmt.Sprint(now) != fmt.Sprint(d.answer) {
		d.t.Errorf("%s was deferred with the answer %v, and now with %v", d.name, d.answer, now)
	}
	refused(d.t, d.n.Client.Publish(ctxOf(d.t), d.v, d.n.Target("thief"), false), codes.FailedPrecondition, "deferred", d.n.Target(d.name))
	refused(d.t, d.n.Client.Unstage(ctxOf(d.t), d.v.ID), codes.FailedPrecondition, d.n.Target(d.name))
}

// again is the next pod, with the volume unstaged in between.
func (d *deferredToPod) again() {
	d.t.Helper()
	ok(d.t, d.n.Client.Unpublish(ctxOf(d.t), d.v.ID, d.n.Target(d.name)))
	ok(d.t, d.n.Client.Unstage(ctxOf(d.t), d.v.ID))
	ok(d.t, d.n.Client.Stage(ctxOf(d.t), d.v))
	d.answer = d.publish()
}

func (d deferredToPod) remove() {
	d.t.Helper()
	ok(d.t, d.n.Client.Unpublish(ctxOf(d.t), d.v.ID, d.n.Target(d.name)))
	ok(d.t, d.n.Client.Unstage(ctxOf(d.t), d.v.ID))
	ok(d.t, d.n.Client.Delete(ctxOf(d.t), d.v.ID))
}

// told returns what a csi-node lists of its volumes and snapshots.
func told(ctx context.Context, n *testnode.Node) (string, error) {
	var b strings.Builder
	volumes, err := n.Client.ListVolumes(ctx, &csi.ListVolumesRequest{})
	if err != nil {
		return "", err
	}
	for _, e := range volumes.GetEntries() {
		v := e.GetVolume()
		about := v.GetVolumeContext()
		fmt.Fprintln(&b, v.GetVolumeId(), v.GetCapacityBytes(), v.GetContentSource(), about["csi.crust.dev/name"], about["fsGroupStrategy"])
	}
	snapshots, err := n.Client.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	for _, e := range snapshots.GetEntries() {
		fmt.Fprintln(&b, e.GetSnapshot())
	}
	return strings.ReplaceAll(b.String(), "  ", " "), err // protobuf's text has one space or two
}

// TestVolumesInUseGoOnThroughUpgradeDowngradeUpgrade replaces csi-node under pods that write all
// the time.
func TestVolumesInUseGoOnThroughUpgradeDowngradeUpgrade(t *testing.T) {
	forEachRelease(t, func(t *testing.T, release string) {
		n := testnode.NewStopped(t, "")
		n.Bin = program(t, release, "csi-node")
		n.Begin()
		isVersion(t, n, release)
		fleets := []*fleet{newFleet(t, n, "first", 100)}
		for i, version := range []string{today, release, today} {
			before, err := told(ctxOf(t), n)
			ok(t, err)
			becomes(t, n, version)
			after, err := told(ctxOf(t), n)
			ok(t, err)
			if before != after {
				t.Errorf("before %s:\n%safter it:\n%s", version, before, after)
			}
			for _, f := range fleets {
				f.use()
				f.change(fmt.Sprint("round", i))
				f.use()
			}
			if i < 2 {
				fleets = append(fleets, newFleet(t, n, version, uint64(100*(i+2))))
			}
		}
		for _, f := range fleets {
			f.remove()
		}
		if left, err := told(ctxOf(t), n); err != nil || left != "" {
			t.Errorf("left: %s %v", left, err)
		}
	})
}
