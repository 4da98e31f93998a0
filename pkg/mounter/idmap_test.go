package mounter

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// ids returns owner and group of a file.
func ids(t *testing.T, path string) (uid, gid uint32) {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Uid, st.Gid
}

func TestIDMapsCoverEveryIDOnce(t *testing.T) {
	for _, c := range [][2]uint32{{0, 1}, {2000, 4242}, {4242, 2000}, {5, 5}, {0, 1<<32 - 2}, {7, 8}} {
		var next uint64
		shown := map[uint32]uint32{}
		for _, r := range ShowGroup(c[0], c[1]).GIDs {
			if uint64(r.Disk) != next {
				t.Errorf("%v: a hole or an overlap at %d", c, next)
			}
			next += uint64(r.Count)
			if r.Count == 1 {
				shown[r.Disk] = r.Shown
			}
		}
		if next != 1<<32-1 {
			t.Errorf("%v: %d ids are mapped", c, next)
		}
		if c[0] != c[1] && (shown[c[0]] != c[1] || shown[c[1]] != c[0]) {
			t.Errorf("%v: %v", c, shown)
		}
	}
}

// U01, U04: a file system that no kernel can id-map is refused with an error that names the
// kernel.
func TestU04_AFileSystemThatCannotBeMapped(t *testing.T) {
	dir := t.TempDir()
	check(t, syscall.Mount("ramfs", dir, "ramfs", 0, ""))
	t.Cleanup(func() { check(t, syscall.Unmount(dir, 0)) })
	m, err := OpenTree(dir)
	check(t, err)
	defer m.Close()
	idmap := IDMap{UIDs: []IDRange{{0, 100000, 65536}}, GIDs: []IDRange{{0, 100000, 65536}}}
	err = m.Change(View{IDMap: &idmap})
	if !errors.Is(err, ErrNoIdmap) || !fault.Is(err, fault.State) {
		t.Fatalf("%v", err)
	}
	for _, word := range []string{dir, "idmapped mounts", linux.Uname()} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the error does not say %q: %v", word, err)
		}
	}
}

// One file system is shown with two groups concurrently, and has a third on disk.
func TestF02_IdmappedViewsShowOtherGroups(t *testing.T) {
	for _, fstype := range filesystems {
		t.Run(fstype, func(t *testing.T) {
			root, dev := openRoot(t), formatted(t, fstype)
			for dir := root.Path(); len(dir) >= len(os.TempDir()); dir = filepath.Dir(dir) {
				check(t, os.Chmod(dir, 0o755)) // for the process of another user
			}
			fs := Filesystem{Device: dev, Type: fstype}
			attach := func(name string, group uint32) string {
				m, err := Open(fs)
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close()
				if group != 0 {
					idmap := ShowGroup(2000, group)
					if err := m.Change(View{IDMap: &idmap}); err != nil {
						t.Fatal(err)
					}
				}
				path := filepath.Join(root.Path(), name)
				target, err := root.Target(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := m.Attach(target); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := target.Unmount(); err != nil {
						t.Error(err)
					}
					target.Close()
				})
				return path
			}
			plain, a, b := attach("plain", 0), attach("a", 4242), attach("b", 555)
			if err := os.Chown(plain, 0, 2000); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(plain, 0o770|os.ModeSetgid); err != nil {
				t.Fatal(err)
			}
			// A process that has only the group can write.
			for dir, group := range map[string]uint32{a: 4242, b: 555} {
				c := asked(t, dir, "echo hello >", filepath.Base(dir))
				c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000, Groups: []uint32{group}}}
				if out, err := c.CombinedOutput(); err != nil {
					t.Fatalf("%s: %v %s", dir, err, out)
				}
				if uid, gid := ids(t, filepath.Join(dir, filepath.Base(dir))); uid != 1000 || gid != group {
					t.Errorf("%s shows %d:%d", dir, uid, gid)
				}
				if uid, gid := ids(t, filepath.Join(plain, filepath.Base(dir))); uid != 1000 || gid != 2000 {
					t.Errorf("the disk has %d:%d", uid, gid)
				}
			}
			c := asked(t, a, "echo no >", "x")
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000, Groups: []uint32{555}}}
			if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), "denied") {
				t.Errorf("another group wrote: %v %s", err, out)
			}
		})
	}
}

// More maps than the cache holds can be used, and an evicted one is made again.
func TestManyIDMaps(t *testing.T) {
	root, dev := openRoot(t), formatted(t, "ext4")
	m, err := Open(Filesystem{Device: dev, Type: "ext4"})
	check(t, err)
	defer m.Close()
	place := filepath.Join(root.Path(), "m")
	for i := range uint32(2*keptNamespaces + 3) {
		group := 5000 + i%(keptNamespaces+7)
		idmap := ShowGroup(0, group)
		view, err := Open(Filesystem{Device: dev, Type: "ext4"})
		check(t, err)
		check(t, view.Change(View{IDMap: &idmap}))
		target, err := root.Target(place)
		check(t, err)
		check(t, view.Attach(target))
		check(t, view.Close())
		if _, gid := ids(t, place); gid != group {
			t.Fatalf("shown is group %d, want %d", gid, group)
		}
		check(t, target.Unmount())
		check(t, target.Close())
	}
}

// asked returns a command about a file in a directory, even if the directory for temporary
// files is below one that only root may enter.
func asked(t *testing.T, dir, command, name string) *exec.Cmd {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	c := exec.Command("/bin/sh", "-c", command+" /proc/self/fd/3/"+name)
	c.ExtraFiles = []*os.File{f}
	return c
}
