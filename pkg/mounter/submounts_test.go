package mounter

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

func mountTmpfs(t *testing.T, dir string) {
	t.Helper()
	check(t, os.MkdirAll(dir, 0o755))
	check(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
}

func mounted(t *testing.T, dir string) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	check(t, err)
	return strings.Contains(string(b), " "+dir+" ")
}

// A tree of mounts on a node, where mounts are shared: it can be published and taken away again, and the source keeps what it has.
func TestD04_ATreeWithSubmountsIsTakenOff(t *testing.T) {
	root := openRoot(t)
	src := filepath.Join(root.Path(), "staging")
	mountTmpfs(t, src)
	check(t, syscall.Mount("", src, "", syscall.MS_SHARED, ""))
	mountTmpfs(t, src+"/sub dir")
	mountTmpfs(t, src+"/sub dir/inner")
	target, err := root.Target(filepath.Join(root.Path(), "target"))
	check(t, err)
	defer target.Close()
	m, err := OpenTree(src)
	check(t, err)
	check(t, m.Attach(target))
	t.Cleanup(func() { _ = syscall.Unmount(target.Path, syscall.MNT_DETACH) })
	check(t, m.Close())
	check(t, os.WriteFile(src+"/sub dir/inner/file", []byte("x"), 0o644))
	if b, err := os.ReadFile(target.Path + "/sub dir/inner/file"); string(b) != "x" {
		t.Errorf("the target shows %q, %v", b, err)
	}

	mountTmpfs(t, src+"/later")
	if !mounted(t, target.Path+"/later") {
		t.Error("what is mounted into the tree later does not appear at the target")
	}
	mountTmpfs(t, target.Path+"/pods")
	if mounted(t, src+"/pods") {
		t.Error("what is mounted at the target appears in the tree")
	}

	inUse, err := os.Open(target.Path + "/sub dir/inner/file")
	check(t, err)
	if err := target.Unmount(); !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("with a file of a submount open: %v", err)
	}
	check(t, inUse.Close())
	check(t, target.Unmount())
	check(t, target.Remove())
	for _, dir := range []string{"", "/sub dir", "/sub dir/inner", "/later"} {
		if name := strings.ReplaceAll(src+dir, " ", `\040`); !mounted(t, name) {
			t.Errorf("%s was unmounted too", src+dir)
		}
	}
}

// The kubelet's directory is often a link to a larger disk. A driver that publishes what is mounted at its staging path works there too.
func TestD05_ATreeBelowALinkedRoot(t *testing.T) {
	dir := t.TempDir()
	check(t, os.Mkdir(dir+"/disk", 0o755))
	check(t, os.Symlink("disk", dir+"/kubelet"))
	root, err := OpenRoot(dir + "/kubelet")
	check(t, err)
	defer root.Close()
	at := func(name string) *Target {
		target, err := root.Target(dir + "/kubelet/" + name)
		check(t, err)
		t.Cleanup(func() { target.Close() })
		return target
	}
	mountTmpfs(t, dir+"/disk/staging")
	check(t, os.WriteFile(dir+"/disk/staging/file", nil, 0o644))
	m, err := at("staging").OpenTree()
	check(t, err)
	defer m.Close()
	check(t, m.Attach(at("target")))
	check(t, m.Close())
	if _, err := os.Stat(dir + "/disk/target/file"); err != nil {
		t.Error(err)
	}
	check(t, at("target").Unmount())

	check(t, os.Symlink("staging", dir+"/disk/link")) // as a pod could plant one
	for _, name := range []string{"link", "target", "absent"} {
		if m, err := at(name).OpenTree(); !fault.Is(err, fault.State) {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
}

// csi-node runs in a container that shares the kubelet's directory with the host. What a pod mounted in its volume goes on both sides.
func TestD04_SubmountsGoInTheHostsNamespaceToo(t *testing.T) {
	root := openRoot(t)
	shared := filepath.Join(root.Path(), "kubelet")
	mountTmpfs(t, shared)
	check(t, syscall.Mount("", shared, "", syscall.MS_SHARED, ""))
	at := shared + "/target"
	mountTmpfs(t, at)
	mountTmpfs(t, at+"/pods")
	host := exec.Command("unshare", "--mount", "--propagation", "unchanged", "sh", "-c", "echo ready; exec cat")
	in, err := host.StdinPipe()
	check(t, err)
	out, err := host.StdoutPipe()
	check(t, err)
	check(t, host.Start())
	t.Cleanup(func() { in.Close(); _ = host.Wait() })
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	there := func() string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", host.Process.Pid))
		check(t, err)
		return string(b)
	}
	if !strings.Contains(there(), at+"/pods ") {
		t.Fatal("the other namespace does not have the mounts")
	}
	target, err := root.Target(at)
	check(t, err)
	defer target.Close()
	check(t, target.Unmount())
	if strings.Contains(there(), at) {
		t.Errorf("the host still has it:\n%s", there())
	}
}

// A pod put a link where a mount's directory was. Nothing that the link leads to is unmounted.
func TestD04_ASubmountBehindALinkIsLeftAlone(t *testing.T) {
	root := openRoot(t)
	at, victim := filepath.Join(root.Path(), "target"), filepath.Join(root.Path(), "victim")
	mountTmpfs(t, at)
	mountTmpfs(t, victim+"/sub")
	target, err := root.Target(at)
	check(t, err)
	defer target.Close()
	check(t, os.Symlink(victim, at+"/dir"))
	if err := target.unmountInside("dir/sub"); err == nil {
		t.Error("went through a link")
	}
	if !mounted(t, victim+"/sub") {
		t.Error("another mount was taken off")
	}
}
