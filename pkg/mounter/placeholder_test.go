package mounter

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// C15, C24: a kubelet binds a directory of a placeholder for a container that mounts a subPath. What it binds is as unusable as the
// placeholder, whatever the container's runtime does with it.
func TestC15_C24_APlaceholderWithDirectories(t *testing.T) {
	r := openRoot(t)
	target, err := r.Target(r.Path() + "/m")
	check(t, err)
	defer target.Close()
	check(t, AttachPlaceholder(target, ".", "a", "a/b", "c"))
	check(t, AttachPlaceholder(target, ".", "a", "a/b", "c"))
	check(t, AttachPlaceholder(target)) // a repeated call of somebody who knows no directories
	defer unmountAt(t, r, "m")
	at, bound, other := r.Path()+"/m", r.Path()+"/bound", r.Path()+"/other"
	for _, dir := range []string{bound, other} {
		check(t, os.Mkdir(dir, 0o755))
	}
	mount := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("mount", args...).CombinedOutput(); err != nil {
			t.Fatalf("mount %v: %v: %s", args, err, out)
		}
	}
	mount("--bind", at+"/a", bound)
	defer unmountAt(t, r, "bound")
	mount("-t", "tmpfs", "other", other)
	defer unmountAt(t, r, "other")
	check(t, os.Mkdir(other+"/dir", 0o755))
	mount("-o", "remount,bind,rw", bound) // as crun does
	for _, dir := range []string{at, at + "/a", at + "/a/b", at + "/c", bound, bound + "/b"} {
		st, err := os.Stat(dir)
		if err != nil || st.Mode() != os.ModeDir {
			t.Errorf("%s: %v, %v", dir, st, err)
		}
		if err := os.Mkdir(dir+"/more", 0o755); !errors.Is(err, linux.EROFS) {
			t.Errorf("%s can be written to: %v", dir, err)
		}
		for _, path := range []string{dir, dir + "/none/below"} {
			if is, err := IsPlaceholder(path); !is || err != nil {
				t.Errorf("%s is of a placeholder: %v, %v", path, is, err)
			}
		}
	}
	for _, path := range []string{r.Path(), other, other + "/dir", other + "/none", "/", "/proc/self", filepath.Dir(r.Path())} {
		if is, err := IsPlaceholder(path); is || err != nil {
			t.Errorf("%s is of a placeholder: %v, %v", path, is, err)
		}
	}
}

// C15: a pod removes or replaces what it mounts as a subPath, and its container starts again. What was bound for a container that is
// just being created stays where it was.
func TestC15_ASubPathThatWasReplacedIsBoundAgain(t *testing.T) {
	dir, places := t.TempDir(), t.TempDir()
	path := dir + "/x"
	bind := func() string {
		t.Helper()
		f, err := linux.Openat2(linux.CWD, path, linux.OPath, 0)
		check(t, err)
		defer f.Close()
		at, err := BindAt(f, places, "name")
		check(t, err)
		return at
	}
	t.Cleanup(func() {
		bound, err := filepath.Glob(places + "/*")
		check(t, err)
		for _, at := range bound {
			check(t, linux.Unmount(at))
		}
	})
	file := func(text string) {
		t.Helper()
		check(t, errors.Join(os.WriteFile(dir+"/next", []byte(text), 0o644), os.Rename(dir+"/next", path)))
	}
	check(t, os.Mkdir(path, 0o755))
	first := bind()
	check(t, os.WriteFile(path+"/f", []byte("first"), 0o644))
	if bind() != first {
		t.Error("the same directory is bound twice")
	}
	check(t, os.RemoveAll(path))
	file("one")
	if b, err := os.ReadFile(bind()); string(b) != "one" || err != nil {
		t.Errorf("a file in the place of a directory: %q, %v", b, err)
	}
	old := bind()
	file("two")
	if b, err := os.ReadFile(bind()); string(b) != "two" || err != nil {
		t.Errorf("a file that was replaced: %q, %v", b, err)
	}
	if b, err := os.ReadFile(old); string(b) != "one" || err != nil {
		t.Errorf("at the path from before: %q, %v", b, err)
	}
	check(t, os.Remove(path))
	check(t, os.Mkdir(path, 0o755))
	check(t, os.WriteFile(path+"/f", []byte("again"), 0o644))
	if b, err := os.ReadFile(bind() + "/f"); string(b) != "again" || err != nil {
		t.Errorf("a directory again: %q, %v", b, err)
	}
}
