//go:build vm

// Tests of publishes whose SELinux label differs from the mounted volume's, in a kernel with
// SELinux.

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// S09: label conflicts are counted apart from other errors, under the access modes of the kubelet's
// metrics.
func TestS09_MetricsCountLabelsByAccessMode(t *testing.T) {
	n, metrics := withMetrics(t)
	want := func(mode, outcome, value string) {
		t.Helper()
		wantMetric(t, metrics(), fmt.Sprintf(`crust_selinux_context_mounts_total{access_mode="%s",outcome="%s"}`, mode, outcome), value)
	}

	v := create(t, n, "a", csiclient.Volume{FSType: "xfs", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), target, false))
	ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), target, false))
	refused(t, n.Client.Publish(ctxOf(t), labelled(v, labelB), n.Target("b"), false), codes.FailedPrecondition, labelA, labelB)
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false), codes.FailedPrecondition, labelA)
	refused(t, n.Client.Publish(ctxOf(t), labelled(v, labelB), target, false), codes.AlreadyExists, labelA, labelB)
	other := labelled(v, labelA)
	other.MountFlags = append(other.MountFlags, "swalloc")
	refused(t, n.Client.Publish(ctxOf(t), other, n.Target("b"), false), codes.FailedPrecondition, "swalloc")
	refused(t, n.Client.Publish(ctxOf(t), other, target, false), codes.AlreadyExists, "swalloc")
	want("RWO", "applied", "1")
	want("RWO", "conflict", "3")
	want("RWO", "error", "1")
	want("RWO", "mismatch", "")
	down(t, n, v.ID, target)

	// Somebody still has the volume mounted, though no pod has it.
	once := create(t, n, "once", csiclient.Volume{FSType: "ext4", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER})
	target = n.Target("once")
	ok(t, n.Client.Stage(ctxOf(t), once))
	ok(t, n.Client.Publish(ctxOf(t), labelled(once, labelA), target, false))
	left := t.TempDir()
	run(t, "mount", "--bind", target, left)
	gone := sync.OnceFunc(func() { testnode.Unmount(t, left) })
	t.Cleanup(gone)
	ok(t, n.Client.Unpublish(ctxOf(t), once.ID, target))
	refused(t, n.Client.Publish(ctxOf(t), labelled(once, labelB), target, false), codes.FailedPrecondition,
		labelA, labelB, "mounted elsewhere")
	want("RWOP", "applied", "1")
	want("RWOP", "conflict", "1")
	want("RWOP", "error", "")
	want("RWO", "conflict", "3")
	gone()
	down(t, n, once.ID)

	// Each mount of a share has its own label, so only a repeated call can conflict.
	dir := serveNFS(t)
	ok(t, os.Mkdir(filepath.Join(dir, "v"), 0o755))
	share := csiclient.Volume{ID: "v", Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
		Context: map[string]string{"server": "127.0.0.1", "share": "/v"}}
	readers := share
	readers.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	ok(t, n.Client.Stage(ctxOf(t), share))
	ok(t, n.Client.Publish(ctxOf(t), labelled(share, labelA), n.Target("c"), false))
	ok(t, n.Client.Publish(ctxOf(t), labelled(readers, labelB), n.Target("d"), false))
	ok(t, n.Client.Publish(ctxOf(t), labelled(share, labelA), n.Target("c"), false))
	refused(t, n.Client.Publish(ctxOf(t), labelled(share, labelB), n.Target("c"), false), codes.AlreadyExists, labelA, labelB)
	want("RWX", "applied", "1")
	want("RWX", "conflict", "1")
	want("RWX", "error", "")
	want("ROX", "applied", "1")
	want("ROX", "conflict", "")
	for _, target := range []string{"c", "d"} {
		ok(t, n.Client.Unpublish(ctxOf(t), share.ID, n.Target(target)))
	}
	ok(t, n.Client.Unstage(ctxOf(t), share.ID))
}

// S04: a volume that is mounted without a label gets none at a second target.
func TestS04_ALabelBesideAMountWithoutOne(t *testing.T) {
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	for range 2 {
		refused(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), n.Target("b"), false), codes.FailedPrecondition, v.ID, labelA, `""`)
		n.Restart()
	}
	down(t, n, v.ID, target)
}

// S04: different spellings that the kernel takes for one label are one.
func TestS04_OneLabelInOtherSpellings(t *testing.T) {
	n := testnode.New(t, "")
	label := func(level string) string { return "system_u:object_r:svirt_image_t:" + level }
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
	ok(t, n.Client.Stage(ctxOf(t), v))
	targets := []string{n.Target("a")}
	ok(t, n.Client.Publish(ctxOf(t), labelled(v, label("s0:c1,c2,c3")), targets[0], false))
	for i, spelling := range []string{"s0:c1.c3", "s0:c3,c1,c2", "s0:c1.c3-s0:c1,c2,c3"} {
		targets = append(targets, n.Target(fmt.Sprint(i)))
		ok(t, n.Client.Publish(ctxOf(t), labelled(v, label(spelling)), targets[i+1], false))
		ok(t, n.Client.Publish(ctxOf(t), labelled(v, label(spelling)), targets[0], false))
	}
	for _, other := range []string{"s0:c1,c2", "s0:c1.c4", "s0", "s0-s0:c1.c3"} {
		refused(t, n.Client.Publish(ctxOf(t), labelled(v, label(other)), n.Target("other"), false), codes.FailedPrecondition, label(other))
	}
	down(t, n, v.ID, targets...)
}

// S04, S09: a pod's event names only those pods with the volume that are in its namespace, because
// its readers may not know others. The log names all.
func TestS04_AConflictNamesPodsOfTheNamespaceOnly(t *testing.T) {
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER})
	pod := func(namespace, name, label string) csiclient.Volume {
		u := labelled(v, label)
		u.Context = map[string]string{"csi.storage.k8s.io/pod.namespace": namespace, "csi.storage.k8s.io/pod.name": name,
			"csi.storage.k8s.io/pod.uid": name}
		return u
	}
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), pod("shop", "web-0", labelA), n.Target("a"), false))
	for _, restarted := range []bool{false, true} {
		if restarted {
			n.Restart()
		}
		refused(t, n.Client.Publish(ctxOf(t), pod("shop", "web-1", labelB), n.Target("b"), false), codes.FailedPrecondition,
			labelA, labelB, "used by web-0 of this namespace")
		err := n.Client.Publish(ctxOf(t), pod("bank", "till-0", labelB), n.Target("b"), false)
		refused(t, err, codes.FailedPrecondition, labelA, labelB, "used by a pod of another namespace")
		for _, foreign := range []string{"web-0", "shop"} {
			if strings.Contains(err.Error(), foreign) {
				t.Errorf("the event of a pod in bank would say %q: %v", foreign, err)
			}
		}
		said(t, n, "used by shop/web-0")
	}
	ok(t, n.Client.Publish(ctxOf(t), pod("bank", "till-1", labelA), n.Target("c"), false))
	refused(t, n.Client.Publish(ctxOf(t), pod("shop", "web-1", labelB), n.Target("b"), false), codes.FailedPrecondition,
		"used by web-0 of this namespace, and by a pod of another")
	down(t, n, v.ID, n.Target("a"), n.Target("c"))
}
