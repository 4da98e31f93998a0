package node

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestB08_CompletionKnowsWhatThisNodeHas(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	made, err := n.Client.Create(ctxOf(t), "pvc-complete", size, csiclient.Volume{FSType: "ext4"}, ofClaim, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	exits(t, n, 0, []string{"volume", "snapshot", v.ID, "evening"})
	crust := serveSandbox(t, n.Dir, n.Target("d"))
	offers := func(want string, args ...string) {
		t.Helper()
		args = append([]string{"__complete", "--endpoint", n.Endpoint(), "--kubelet-dir", n.KubeletDir()}, args...)
		out, err := exec.Command(testnode.BuildCommand(t, "crustctl", ""), args...).Output()
		ok(t, err)
		for line := range strings.Lines(string(out)) {
			word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
			if word == want {
				return
			}
		}
		t.Errorf("%v: %q is not offered:\n%s", args, want, out)
	}
	offers("pool", "pool", "check", "")
	offers("pool", "volume", "list", "--pool", "")
	offers(v.ID, "volume", "expand", "")
	offers("shop/orders", "volume", "show", "shop")
	offers("pvc-complete", "volume", "show", "")
	offers(n.Target("a"), "volume", "unpublish", v.ID, "")
	offers("shop/orders", "history", "--claim", "")
	offers("box-7", "sandbox", "rm", "--crust", crust, "")
	offers(n.Target("d"), "sandbox", "stats", "--crust", crust, "box-7", "")
	offers("json", "pool", "list", "-o", "")
	snaps := exits(t, n, 0, []string{"volume", "list", "-o", "json"})
	_, rest, _ := strings.Cut(snaps, `"snapshot_id": "`)
	snap, _, _ := strings.Cut(rest, `"`)
	offers(snap, "volume", "delete", "pool.s")
	offers(snap, "volume", "create", "x", "--from-snapshot", "")
	exits(t, n, 0, []string{"volume", "delete", snap})
	down(t, n, v.ID, n.Target("a"))
}
