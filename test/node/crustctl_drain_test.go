package node

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// oneSandbox is a CRUST server with one sandbox that has a volume at a host target.
type oneSandbox struct {
	crustv1alpha1.UnimplementedSandboxManagementServer
	target string
}

func (s oneSandbox) ListSandboxes(context.Context, *crustv1alpha1.ListSandboxesRequest) (*crustv1alpha1.ListSandboxesResponse, error) {
	return &crustv1alpha1.ListSandboxesResponse{Sandboxes: []*crustv1alpha1.Sandbox{{SandboxId: "box-7", Kind: "namespace",
			Volumes: []*crustv1alpha1.Volume{{HostVolumeId: "/dev/loop9", HostTargetPath: s.target,
				FileSystem: "ext4", State: "published"}}}}},
		nil
}

// serveSandbox serves one and returns its socket.
func serveSandbox(t *testing.T, dir, target string) string {
	t.Helper()
	path := filepath.Join(dir, "crust.sock")
	l, err := net.Listen("unix", path)
	ok(t, err)
	s := grpc.NewServer()
	crustv1alpha1.RegisterSandboxManagementServer(s, oneSandbox{target: target})
	go func() { _ = s.Serve(l) }() // until it is stopped
	t.Cleanup(s.Stop)
	return "unix://" + path
}

func TestB08_DrainCheckSaysWhatADrainMeets(t *testing.T) {
	t.Parallel()
	at := testnode.NewFailpoints(t)
	n := testnode.NewStopped(t, "failpoint")
	n.Env = at.Env()
	n.Begin()
	noCrust := filepath.Join(n.Dir, "none.sock")
	reboot := []string{"node", "drain-check", "--crust", "unix://" + noCrust}
	remove := append([]string{"node", "drain-check", "--remove"}, reboot[2:]...)
	exits(t, n, 0, reboot, "node-1", "can be rebooted", "no CRUST server")
	exits(t, n, 0, remove, "nothing is lost")

	made, err := n.Client.Create(ctxOf(t), "pvc-drain", size, csiclient.Volume{FSType: "ext4"}, ofClaim, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4",
		Context: map[string]string{"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "web-0",
			"csi.storage.k8s.io/pod.uid": "u"}}
	// An unused volume is no obstacle to a reboot, but one to a removal.
	exits(t, n, 0, reboot, "1 volumes and 0 snapshots", "come back with it")
	exits(t, n, 1, remove, "only-here", "shop/orders", "is lost with it")
	ok(t, n.Client.Stage(ctxOf(t), csiclient.Volume{ID: v.ID, FSType: "ext4"}))
	exits(t, n, 1, reboot, "staged", "shop/orders")
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	exits(t, n, 1, reboot, "in-use", "shop/orders", "shop/web-0", "start on no other node")
	exits(t, n, 1, remove, "in-use", "start nowhere else", "only-here")
	exits(t, n, 0, []string{"volume", "snapshot", v.ID, "evening"})
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	exits(t, n, 0, reboot, "1 volumes and 1 snapshots")
	exits(t, n, 1, remove, "snapshot-only-here", "the snapshot of shop/orders")

	// A volume in a sandbox.
	d := create(t, n, "pvc-deferred", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), d))
	_, deferred, err := publishTo(t, n, d, n.Target("d"), false, "ext4")
	ok(t, err)
	if !deferred {
		t.Fatal("it was mounted here")
	}
	crust := serveSandbox(t, n.Dir, n.Target("d"))
	exits(t, n, 1, []string{"node", "drain-check", "--crust", crust}, "deferral", "in-use", "sandbox", "box-7", "with 1 volumes")
	down(t, n, d.ID, n.Target("d"))
	exits(t, n, 1, []string{"node", "drain-check", "--crust", crust}, "box-7")

	// A running operation.
	hung, ended := at.Hang(t, "create.recorded", func() error {
		_, err := n.Client.Create(ctxOf(t), "pvc-slow", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
		return err
	})
	if !hung {
		t.Fatal("the volume was made")
	}
	exits(t, n, 1, reboot, "operation", "CreateVolume", "volume name pvc-slow")
	at.Off(t)
	ok(t, <-ended)
	exits(t, n, 0, reboot)

	if out := exits(t, n, 1, append(remove, "-o", "json"), `"kind": "only-here"`, `"remove": true`); !strings.HasPrefix(out, "{") {
		t.Errorf("no JSON:\n%s", out)
	}
	n.Kill()
	exits(t, n, 2, reboot, "is csi-node running")
	n.Start()
}

// B8: what cannot be checked does not count as "nothing".
func TestB08_DrainCheckOfAPoolThatIsAway(t *testing.T) {
	t.Parallel()
	n, mount, unmount := onOwnDisk(t)
	n.Begin()
	n.Stop()
	unmount()
	n.Start()
	exits(t, n, 2, []string{"node", "drain-check", "--remove"}, "what is in pool pool cannot be told", "not everything")
	exits(t, n, 2, []string{"pool", "check"}, "could not be looked at")
	mount()
	n.Restart()
	exits(t, n, 0, []string{"node", "drain-check", "--remove"})
}

// B8: a pool that is not configured any more may have the only copy of something.
func TestB08_DrainCheckOfAPoolThatIsNotConfigured(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "forgotten", csiclient.Volume{FSType: "ext4"})
	was, records := n.PoolDir(), filepath.Join(n.Dir, "state/pools")
	begin := func(name, dir string) {
		t.Helper()
		n.Stop()
		n.PoolName, n.Pool = name, dir
		n.Start()
	}
	remove, check := []string{"node", "drain-check", "--remove"}, []string{"pool", "check"}
	begin("different", filepath.Join(n.Dir, "another"))
	for _, args := range [][]string{remove, check} {
		exits(t, n, 1, args, "pool-not-configured", "not configured with pool pool any more", was+" has ", " files in volumes",
			"delete "+records+"/pool.json")
	}
	exits(t, n, 0, []string{"pool", "list"}, "not configured any more: "+was)
	exits(t, n, 0, []string{"pool", "check", "different"})
	exits(t, n, 0, remove[:2], "can be rebooted")
	away := filepath.Join(n.Dir, "away") // its disk, or it is not mounted in the container
	ok(t, os.Rename(was, away))
	exits(t, n, 1, remove, "pool-not-configured", was+"/pool.json: no such file")
	ok(t, os.Mkdir(was, 0o700)) // the mount point of its disk
	exits(t, n, 1, remove, "pool-not-configured", was+"/pool.json: no such file")
	ok(t, os.Remove(was))

	begin("renamed", away) // nothing is forgotten now: another is empty
	ok(t, os.WriteFile(records+"/torn.json", []byte("{"), 0o600))
	out := exits(t, n, 1, check, "torn", "pool-not-configured")
	if strings.Contains(out, "pool.json") || strings.Contains(out, "different") {
		t.Errorf("a pool with another name, or an empty one, counts as forgotten:\n%s", out)
	}
	ok(t, os.Remove(records+"/torn.json"))
	exits(t, n, 0, check)
	ok(t, os.Rename(away, was))
	begin("pool", was)
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
	exits(t, n, 0, remove, "nothing is lost")
}
