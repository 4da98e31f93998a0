package engine

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mounted mounts a tmpfs and returns its path, and its state for the engine.
func mounted(t *testing.T) (string, *mounter.State) {
	t.Helper()
	dir := t.TempDir()
	root, err := mounter.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { root.Close() })
	at := filepath.Join(dir, "v")
	must(t, os.Mkdir(at, 0o755))
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "mode=2771,gid=3000", "v", at).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { must(t, linux.Unmount(at)) })
	target, err := root.Target(at)
	must(t, err)
	t.Cleanup(func() { target.Close() })
	s, err := target.Glance()
	must(t, err)
	t.Cleanup(func() { s.Close() })
	return at, s
}

// C15: a subPath that is missing is made as a kubelet makes it, whatever the umask is. One that is there is left as it is.
func TestC15_AMissingSubPathIsMade(t *testing.T) {
	at, s := mounted(t)
	must(t, os.Mkdir(at+"/there", 0o700))
	must(t, os.WriteFile(at+"/there/file", []byte("text"), 0o600))
	must(t, os.Symlink("there", at+"/link"))
	for _, c := range []struct{ sub, made string }{
		{"there", ""}, {"there/file", ""}, {"a", "a"}, {"b/c/d", "b b/c b/c/d"}, {"there/new", "there/new"},
		{"link/beyond/more", "there/beyond there/beyond/more"}, {"e//f/", "e e/f"},
	} {
		called := 0
		err := SubPath(s, c.sub, func(f *os.File) error {
			called++
			want, err := os.Stat(filepath.Join(at, c.sub))
			must(t, err)
			got, err := os.Stat("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
			must(t, err)
			if !os.SameFile(want, got) {
				t.Errorf("%s is another file", c.sub)
			}
			return nil
		})
		if err != nil || called != 1 {
			t.Errorf("%s: %v, called %d times", c.sub, err, called)
		}
		for _, dir := range strings.Fields(c.made) {
			st, err := os.Stat(filepath.Join(at, dir))
			if err != nil || st.Mode() != os.ModeDir|os.ModeSetgid|0o771 {
				t.Errorf("%s: %v, %v", dir, st.Mode(), err)
			}
			if out, err := exec.Command("stat", "-c", "%u %g", filepath.Join(at, dir)).Output(); err != nil || string(out) != "0 3000\n" {
				t.Errorf("%s belongs to %s, %v", dir, out, err)
			}
		}
	}
	if st, err := os.Stat(at + "/there"); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("a directory of the pod's has become %v, %v", st.Mode(), err)
	}
}

// C15, C20: nothing is made outside the volume, below a file, or through a link that leads nowhere.
func TestC15_C20_ASubPathThatCannotBeMade(t *testing.T) {
	at, s := mounted(t)
	outside := t.TempDir()
	for name, to := range map[string]string{"up": "../..", "out": outside, "nowhere": "none/x", "abs": "/none"} {
		must(t, os.Symlink(to, filepath.Join(at, name)))
	}
	must(t, os.WriteFile(at+"/file", nil, 0o644))
	refused := func(sub string, kind fault.Kind, why string) {
		t.Helper()
		err := SubPath(s, sub, func(*os.File) error { t.Errorf("%s is given out", sub); return nil })
		if !fault.Is(err, kind) || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", sub, err)
		}
	}
	refused("up/x", fault.Invalid, "leads out")
	refused("out/x", fault.Invalid, "leads out")
	refused("abs", fault.Invalid, "leads out")
	refused("abs/x", fault.Invalid, "leads out")
	refused("../x", fault.Invalid, "leads out")
	refused("nowhere", fault.State, "could not be made")
	refused("nowhere/y", fault.State, "could not be made")
	refused("file/x", fault.State, "not a directory")
	if out, err := exec.Command("mount", "-o", "remount,ro", at).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	refused("new", fault.State, "read-only file system")
	if left, err := os.ReadDir(outside); err != nil || len(left) != 0 {
		t.Errorf("outside: %v, %v", left, err)
	}
	names, err := os.ReadDir(at)
	if must(t, err); len(names) != 5 {
		t.Errorf("made: %v", names)
	}
}

// C15, C20: a process of the pod puts another directory in the place of one that was just made. It keeps its permissions.
func TestC15_C20_ADirectoryThatWasExchangedIsNotOpenedUp(t *testing.T) {
	at, _ := mounted(t)
	for name, c := range map[string]struct {
		mode os.FileMode
		uid  int
		full bool
		want bool
	}{
		"made": {0o700, 0, false, true}, "full": {0o700, 0, true, false}, "another's": {0o700, 1000, false, false},
		"read by all": {0o755, 0, false, false},
	} {
		dir := filepath.Join(at, name)
		must(t, os.Mkdir(dir, 0o700))
		must(t, errors.Join(os.Chown(dir, c.uid, 3000), os.Chmod(dir, c.mode)))
		if c.full {
			must(t, os.WriteFile(dir+"/f", nil, 0o600))
		}
		f, err := os.Open(dir)
		must(t, err)
		err = setMode(f, 0o777)
		st, serr := f.Stat()
		must(t, errors.Join(serr, f.Close()))
		if opened := st.Mode().Perm() == 0o777; opened != c.want || (err == nil) != c.want {
			t.Errorf("%s: %v, %v", name, st.Mode(), err)
		}
	}
}
