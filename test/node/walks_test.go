package node

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// freeze blocks every change of a file system until thaw, which may be called often.
func freeze(t testing.TB, dir string) (thaw func()) {
	t.Helper()
	f, err := os.Open(dir)
	ok(t, err)
	ok(t, linux.Freeze(f))
	frozen := true
	thaw = func() {
		if frozen {
			ok(t, linux.Thaw(f))
			ok(t, f.Close())
		}
		frozen = false
	}
	t.Cleanup(thaw)
	return thaw
}

// 11.5: events report a walk with its pod, with the remaining time or that it is unknown, and with
// its end. A frozen file system holds the walk, so nothing depends on the machine's speed.
func TestEvents_AWalkTellsHowLongItWillTake(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, holder := up(t, n, "holder", csiclient.Volume{FSType: "ext4"})
	v = with(v, "", "csi.storage.k8s.io/pod.namespace", "shop", "csi.storage.k8s.io/pod.name", "db-0",
		"csi.storage.k8s.io/pod.uid", "11-22")
	const files = 20000
	fillTree(t, holder, files)
	walk := func() *inventory.Walk {
		t.Helper()
		resp, err := n.Client.DescribeOperations(ctxOf(t), &inventory.DescribeOperationsRequest{})
		ok(t, err)
		if len(resp.GetWalks()) == 0 {
			t.Fatal("no walk is told of")
		}
		w := resp.GetWalks()[len(resp.GetWalks())-1]
		if w.GetVolume() != v.ID || w.GetPod() != "shop/db-0" || w.GetPodUid() != "11-22" ||
			time.Since(w.GetSince().AsTime()) > time.Minute {
			t.Errorf("%v", w)
		}
		return w
	}
	publish := func(group, target string) error {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		return n.Client.Publish(ctx, with(v, group), target, false)
	}
	thaw := freeze(t, holder)
	target := n.Target("pod")
	refused(t, publish("4242", target), codes.DeadlineExceeded)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		resp, err := n.Client.DescribeOperations(ctxOf(t), &inventory.DescribeOperationsRequest{})
		ok(t, err)
		if len(resp.GetWalks()) > 0 {
			break // earlier steps may take a while
		}
		_ = publish("4242", target)
	}
	if w := walk(); w.GetEnded() != nil || w.GetFailed() ||
		!strings.HasPrefix(w.GetProgress(), "0 files looked at, 0 changed for group 4242") ||
		!strings.HasSuffix(w.GetProgress(), ", how long it will take cannot be told") {
		t.Errorf("before the first file: %v", w)
	}
	thaw()
	end := time.Now().Add(time.Minute)
	for walk().GetEnded() == nil && time.Now().Before(end) {
		time.Sleep(10 * time.Millisecond)
	}
	if w := walk(); w.GetEnded() == nil || w.GetFailed() || strings.Contains(w.GetProgress(), "how long") ||
		strings.Contains(w.GetProgress(), "left") || strings.HasPrefix(w.GetProgress(), "0 files") {
		t.Errorf("at the end: %v", w)
	}
	for {
		err := n.Client.Publish(ctxOf(t), with(v, "4242"), target, false)
		if err == nil {
			break
		}
		refused(t, err, codes.Aborted)
	}
	// On its way. If a walk ends before it is held up, another follows.
	for try, held := 0, false; !held; try++ {
		if try == 20 {
			t.Fatal("no walk was held up on its way")
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		thaw := freeze(t, holder)
		group := []string{"4243", "4244"}[try%2]
		refused(t, publish(group, target), codes.DeadlineExceeded)
		for !held && walk().GetEnded() == nil {
			thaw()
			time.Sleep(time.Millisecond)
			thaw = freeze(t, holder)
			held = !strings.HasPrefix(walk().GetProgress(), "0 files") && walk().GetEnded() == nil
		}
		if p := walk().GetProgress(); held && (!strings.Contains(p, ", about ") || !strings.HasSuffix(p, " left")) {
			t.Errorf("on its way: %s", p)
		}
		thaw()
		for n.Client.Publish(ctxOf(t), with(v, group), target, false) != nil {
			time.Sleep(10 * time.Millisecond)
		}
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	down(t, n, v.ID, holder)
}
