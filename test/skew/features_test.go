package skew

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// with restarts csi-node with other flags.
func with(n *testnode.Node, flags ...string) {
	n.T.Helper()
	n.Args = flags
	n.Become(n.Bin)
}

// offers reports whether csi-node has a capability.
func offers(t testing.TB, n *testnode.Node, what csi.NodeServiceCapability_RPC_Type) bool {
	t.Helper()
	r, err := n.Client.NodeGetCapabilities(ctxOf(t), &csi.NodeGetCapabilitiesRequest{})
	ok(t, err)
	for _, c := range r.GetCapabilities() {
		if c.GetRpc().GetType() == what {
			return true
		}
	}
	return false
}

// onHost does what tenant.use does, for a pod whose volume the node has mounted.
func (p *tenant) onHost() {
	p.t.Helper()
	p.lines = append(p.lines, fmt.Sprintf("line %d of %s, on the node", len(p.lines), p.name))
	out, err := exec.Command("sh", "-c", `echo "$0" >>"$1/f" && cat "$1/f"`, p.lines[len(p.lines)-1], p.Target).CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != strings.Join(p.lines, "\n") {
		p.t.Errorf("%s reads %q, and wrote %q: %v", p.name, out, p.lines, err)
	}
	p.call("publish once more", p.Publish)
	p.call("stats", p.Stats)
}

// beginOnHost starts the next pod, whose volume the node mounts.
func (p *tenant) beginOnHost() {
	p.t.Helper()
	p.Tenant = p.a.Tenant(p.t, p.name, p.v)
	p.call("publish", p.Publish)
	p.onHost()
}

func (p *tenant) endOnHost() {
	p.t.Helper()
	p.onHost()
	p.call("unpublish", p.Unpublish)
}

func TestRuntimeAssistedMountsAreSwitchedOffAndOnUnderVolumes(t *testing.T) {
	n := testnode.New(t, "")
	s := testcrust.NewServer(t, n, "namespace", program(t, today, "crustd"))
	a := testcrust.NewAgent(t, s, program(t, today, "crust-agent"))
	deferred, stays, mounted := newTenant(t, a, "deferred"), newTenant(t, a, "stays"), newTenant(t, a, "mounted")
	deferred.begin()
	stays.begin()

	with(n, "--runtime-assisted-mounts=false")
	if offers(t, n, crust.NodeCapability) {
		t.Error("csi-node says that it defers")
	}
	deferred.use() // with the repeated publish
	stays.use()
	mounted.beginOnHost()
	err := n.Client.Publish(ctxOf(t), stays.v, n.Target("thief"), false)
	refused(t, err, codes.FailedPrecondition, stays.v.ID, "is deferred to the runtime", stays.Target)
	deferred.end()
	deferred.beginOnHost()

	with(n)
	if !offers(t, n, crust.NodeCapability) {
		t.Error("csi-node does not say that it defers")
	}
	stays.use()
	deferred.onHost()
	mounted.endOnHost()
	mounted.begin()
	deferred.endOnHost()
	deferred.begin()
	for _, p := range []*tenant{deferred, stays, mounted} {
		p.end()
		s.Delete(p.v)
	}
}

// owned is a volume of a strategy, with some files.
type owned struct {
	t      *testing.T
	n      *testnode.Node
	name   string
	v      csiclient.Volume
	target string
}

func newOwned(t *testing.T, n *testnode.Node, strategy string) *owned {
	t.Helper()
	o := &owned{t: t, n: n, name: strategy, v: csiclient.Volume{FSType: "ext4"}, target: n.Target(strategy)}
	made, err := n.Client.Create(ctxOf(t), o.name, size, o.v, map[string]string{"fsGroupStrategy": strategy}, nil)
	ok(t, err)
	o.v.ID, o.v.Context = made.GetVolumeId(), made.GetVolumeContext()
	ok(t, n.Client.Stage(ctxOf(t), o.v))
	ok(t, n.Client.Publish(ctxOf(t), o.v, o.target, false))
	for _, dir := range []string{"", "/a", "/a/b"} {
		ok(t, os.MkdirAll(o.target+dir, 0o700))
		ok(t, os.WriteFile(o.target+dir+"/f", []byte(strategy), 0o600))
	}
	ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, o.target))
	return o
}

// publish is for a pod with that fsGroup. "" means none, or one that the kubelet does not pass.
func (o *owned) publish(group, target string) error {
	v := o.v
	v.Group = group
	return o.n.Client.Publish(ctxOf(o.t), v, target, false)
}

// shows checks every file's group.
func (o *owned) shows(group uint32, target string) {
	o.t.Helper()
	ok(o.t, filepath.WalkDir(target, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() == "lost+found" {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Sys().(*syscall.Stat_t).Gid != group {
			o.t.Errorf("%s: %s has group %d, want %d", o.name, path, info.Sys().(*syscall.Stat_t).Gid, group)
		}
		return err
	}))
}

func (o *owned) remove() {
	o.t.Helper()
	ok(o.t, o.n.Client.Unstage(ctxOf(o.t), o.v.ID))
	ok(o.t, o.n.Client.Delete(ctxOf(o.t), o.v.ID))
}

func TestTheFsGroupPolicyIsSwitchedUnderVolumes(t *testing.T) {
	n := testnode.New(t, "")
	for _, strategy := range []string{"chown", "idmap"} {
		t.Run(strategy, func(t *testing.T) {
			o := newOwned(t, n, strategy)
			ok(t, o.publish("2000", o.target))
			o.shows(2000, o.target)

			with(n, "--fsgroup-policy", "File")
			if offers(t, n, csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP) {
				t.Error("csi-node says that it applies groups")
			}
			ok(t, o.publish("", o.target)) // the kubelet repeats it, and passes no group
			o.shows(2000, o.target)
			refused(t, o.publish("2000", n.Target("other")), codes.InvalidArgument, "--fsgroup-policy File", "VOLUME_MOUNT_GROUP")
			ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, o.target))
			ok(t, o.publish("", o.target))
			// The kubelet gives the files to another pod's group, and is stopped in the middle: the
			// root comes last.
			ok(t, os.Chown(o.target+"/a/b/f", -1, 5000))

			with(n)
			if !offers(t, n, csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP) {
				t.Error("csi-node does not say that it applies groups")
			}
			ok(t, o.publish("2000", o.target)) // unchanged: the kubelet has walked
			ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, o.target))
			ok(t, o.publish("2000", o.target))
			o.shows(2000, o.target)
			ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, o.target))
			o.remove()
		})
	}
}

// A class is recreated with another strategy. Its volumes keep theirs. A volume that gets the new
// one (by a new PersistentVolume) shows the right group, too.
func TestAVolumesStrategyIsChangedUnderPods(t *testing.T) {
	n := testnode.New(t, "")
	for from, to := range map[string]string{"chown": "idmap", "idmap": "chown"} {
		t.Run(from+" to "+to, func(t *testing.T) {
			o := newOwned(t, n, from)
			was := o.v.Context
			ok(t, o.publish("2000", o.target))
			n.Restart()
			o.v.Context = maps.Clone(was)
			o.v.Context["fsGroupStrategy"] = to
			if from == "idmap" {
				refused(t, o.publish("2000", o.target), codes.AlreadyExists, o.v.ID, o.target, "unpublish it first")
			} else {
				ok(t, o.publish("2000", o.target))
			}
			o.shows(2000, o.target)
			// Another pod beside it, with the new strategy; then the first one's next pod.
			ok(t, o.publish("3000", n.Target("second")))
			o.shows(3000, n.Target("second"))
			ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, o.target))
			ok(t, o.publish("3000", o.target))
			o.shows(3000, o.target)
			n.Restart()
			ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, n.Target("second")))
			ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, o.target))
			// And back.
			o.v.Context = was
			ok(t, o.publish("4000", o.target))
			o.shows(4000, o.target)
			ok(t, n.Client.Unpublish(ctxOf(t), o.v.ID, o.target))
			ok(t, n.Client.Unstage(ctxOf(t), o.v.ID))
			ok(t, n.Client.Delete(ctxOf(t), o.v.ID))
		})
	}
	// An unknown value is refused.
	o := newOwned(t, n, "chown")
	o.v.Context = map[string]string{"fsGroupStrategy": "walk"}
	refused(t, o.publish("2000", o.target), codes.InvalidArgument, "fsGroupStrategy", "walk")
	o.remove()
}
