package mounter

import (
	"os"
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

// Two pods have one volume. What one of them mounts in it reaches the other, and stays there when the first pod's mount goes.
func TestD04_UnpublishTakesNoMountFromAnotherPod(t *testing.T) {
	root := openRoot(t)
	first := filepath.Join(root.Path(), "first")
	second := filepath.Join(root.Path(), "second")
	mountTmpfs(t, first)
	check(t, syscall.Mount("", first, "", syscall.MS_SHARED, ""))
	check(t, os.Mkdir(second, 0o755))
	check(t, syscall.Mount(first, second, "", syscall.MS_BIND, ""))
	t.Cleanup(func() { _ = syscall.Unmount(second, syscall.MNT_DETACH) })
	mountTmpfs(t, second+"/sub")
	if !mounted(t, first+"/sub") {
		t.Fatal("the two do not share what is mounted")
	}
	target, err := root.Target(first)
	check(t, err)
	defer target.Close()
	check(t, target.Unmount())
	if mounted(t, first) || !mounted(t, second+"/sub") {
		t.Errorf("at the first %t, at the second %t", mounted(t, first), mounted(t, second+"/sub"))
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
