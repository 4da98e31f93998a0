package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// newOnSmallPool is a node whose pool directory is a file system of 1 GiB.
func newOnSmallPool(t *testing.T, fstype string) *testnode.Node {
	t.Helper()
	dir := t.TempDir()
	img := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(img)
	ok(t, err)
	ok(t, f.Truncate(1<<30))
	ok(t, f.Close())
	run(t, "mkfs."+fstype, "-q", img)
	run(t, "mount", "-o", "loop", img, dir)
	t.Cleanup(func() { run(t, "umount", dir) })
	n := testnode.NewStopped(t, "")
	n.Pool = filepath.Join(dir, "pool")
	n.Begin()
	return n
}

func usedFiles(t testing.TB, n *testnode.Node) string {
	t.Helper()
	return run(t, "find", n.PoolDir(), "-type", "f")
}

func runQuiet(name string, args ...string) error { return exec.Command(name, args...).Run() }

// fill writes a file until its file system is full.
func fill(path string) {
	_ = exec.Command("dd", "if=/dev/zero", "of="+path, "bs=1M", "status=none").Run() // ends with ENOSPC
	_ = exec.Command("dd", "if=/dev/zero", "of="+path, "bs=4k", "oflag=append", "conv=notrunc", "status=none").Run()
	_ = exec.Command("sync", "-f", path).Run()
}
