package node

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

func TestS08_ALabelWithoutSELinuxIsAnError(t *testing.T) {
	t.Parallel()
	if mounter.SELinux().Answer == mounter.Yes {
		return // TestS02_* cover such a kernel
	}
	n := testnode.New(t, "")
	for _, fstype := range filesystems {
		v := create(t, n, fstype,
			csiclient.Volume{FSType: fstype, MountFlags: []string{`context="system_u:object_r:svirt_image_t:s0:c1,c2"`}})
		ok(t, n.Client.Stage(ctxOf(t), v))
		refused(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false), codes.FailedPrecondition, "SELinux", "c1,c2")
		// Beside a pod without a label, too: what is in the way is the kernel, not that pod.
		plain := v
		plain.MountFlags = nil
		ok(t, n.Client.Publish(ctxOf(t), plain, n.Target("b"), false))
		refused(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false), codes.FailedPrecondition, v.ID, "runs without SELinux", "c1,c2")
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("b")))
		down(t, n, v.ID)
	}
}

func wantReadOnly(t testing.TB, dir string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "no"), nil, 0o644); !errors.Is(err, syscall.EROFS) {
		t.Errorf("a write into %s: %v", dir, err)
	}
}

// R01, for a driver that publishes a tree of mounts.
func TestR01_SubmountsAreReadOnlyToo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	ok(t, os.MkdirAll(src, 0o755))
	run(t, "mount", "-t", "tmpfs", "outer", src)
	ok(t, os.Mkdir(src+"/sub", 0o755))
	run(t, "mount", "-t", "tmpfs", "inner", src+"/sub")
	t.Cleanup(func() { testnode.Unmount(t, src+"/sub"); testnode.Unmount(t, src) })
	root, err := mounter.OpenRoot(dir)
	ok(t, err)
	defer root.Close()
	m, err := mounter.OpenTree(src)
	ok(t, err)
	defer m.Close()
	ok(t, m.Change(mounter.View{ReadOnly: true}))
	target, err := root.Target(filepath.Join(dir, "target"))
	ok(t, err)
	defer target.Close()
	ok(t, m.Attach(target))
	ok(t, m.Close())
	wantReadOnly(t, dir+"/target")
	wantReadOnly(t, dir+"/target/sub")
	ok(t, os.WriteFile(src+"/sub/yes", nil, 0o644))
	ok(t, target.Unmount())
	read(t, src+"/sub/yes")
}

func TestR01_ReadOnlyPublishesAreReadOnly(t *testing.T) {
	t.Parallel()
	for _, fstype := range filesystems {
		for _, mode := range []string{"", "Disabled", "IfPossible", "Enabled"} {
			t.Run(fstype+"/"+mode, func(t *testing.T) {
				n := testnode.New(t, "")
				v := create(t, n, "a", csiclient.Volume{FSType: fstype})
				if mode != "" {
					v = with(v, "", "recursiveReadOnly", mode)
				}
				target := n.Target("a")
				ok(t, n.Client.Stage(ctxOf(t), v))
				ok(t, n.Client.Publish(ctxOf(t), v, target, true))
				wantReadOnly(t, target)
				down(t, n, v.ID, target)
			})
		}
	}
}

func TestR03_SharedPropagationIsRefused(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), v))
	for _, option := range []string{"shared", "rshared"} {
		w := with(v, "", "recursiveReadOnly", "Enabled")
		w.MountFlags = []string{option}
		refused(t, n.Client.Publish(ctxOf(t), w, n.Target("a"), true), codes.InvalidArgument, option)
	}
	down(t, n, v.ID)
}
