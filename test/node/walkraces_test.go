package node

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// whileItWalks publishes a volume for group 4242 at a second target, and lets a pod at the first do something between the walk's look at
// the first file and its change of it. make lays out the volume, as somebody before.
func whileItWalks(t *testing.T, make, meanwhile, after func(dir string)) {
	t.Helper()
	at := testnode.NewFailpoints(t)
	n := testnode.NewStopped(t, "failpoint")
	n.Env = at.Env()
	n.Begin()
	v, pod := up(t, n, "raced", csiclient.Volume{FSType: "ext4"})
	ok(t, os.Remove(pod+"/lost+found"))
	make(pod)
	hung, ended := at.Hang(t, "ownership.change", func() error {
		v := with(v, "4242", "fsGroupChangePolicy", "Always", "fsGroupStrategy", "chown")
		return n.Client.Publish(ctxOf(t), v, n.Target("b"), false)
	})
	if !hung {
		t.Fatal("nothing was changed")
	}
	meanwhile(pod)
	at.Off(t)
	ok(t, <-ended)
	after(pod)
	down(t, n, v.ID, pod, n.Target("b"))
}

// F02: a directory may have the setuid bit, which means nothing, and a file of root may take its place during the walk.
func TestF02_ADirectorysModeIsNoFiles(t *testing.T) {
	t.Parallel()
	whileItWalks(t, func(dir string) {
		ok(t, os.Mkdir(dir+"/d", 0o755))
		ok(t, os.Chmod(dir+"/d", 0o777|os.ModeSetuid))
		ok(t, os.Mkdir(dir+"/e", 0o755))
		ok(t, os.Chown(dir+"/e", 0, 4242))
		ok(t, os.Chmod(dir+"/e", 0o770|os.ModeSetgid)) // only d is to be changed
		write(t, dir+"/e/tool", "#!")
		ok(t, os.Chmod(dir+"/e/tool", 0o755))
	}, func(dir string) {
		ok(t, os.Rename(dir+"/d", dir+"/moved"))
		ok(t, os.Rename(dir+"/e/tool", dir+"/d"))
	}, func(dir string) {
		st, err := os.Lstat(dir + "/d")
		ok(t, err)
		if st.Mode()&os.ModeSetuid != 0 {
			t.Errorf("a file of root that was 0755 is %v", st.Mode())
		}
	})
}

// F02: the name by which the walk found a file first is gone. The file still has others.
func TestF02_AFileThatLosesItsFirstName(t *testing.T) {
	t.Parallel()
	whileItWalks(t, func(dir string) {
		ok(t, os.Mkdir(dir+"/z", 0o755))
		write(t, dir+"/a", "")
		ok(t, os.Link(dir+"/a", dir+"/z/b"))
		ok(t, os.Link(dir+"/a", dir+"/z/c"))
		ok(t, os.Chown(dir+"/z", 0, 4242))
		ok(t, os.Chmod(dir+"/z", 0o770|os.ModeSetgid)) // only the file is to be changed
	}, func(dir string) {
		ok(t, os.Remove(dir+"/a"))
	}, func(dir string) {
		st, err := os.Lstat(filepath.Join(dir, "z/b"))
		ok(t, err)
		if gid := st.Sys().(*syscall.Stat_t).Gid; gid != 4242 {
			t.Errorf("group %d", gid)
		}
	})
}
