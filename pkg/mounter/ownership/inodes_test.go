package ownership

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// inode has the data that both a path and an inode table provide.
type inode struct {
	gid  uint32
	mode uint16
}

func collect(t testing.TB, r io.ReaderAt, size int64) (map[uint64]inode, error) {
	t.Helper()
	var mu sync.Mutex
	found := map[uint64]inode{}
	err := ext4Inodes(context.Background(), r, size, func(i linux.Inode) bool {
		mu.Lock()
		defer mu.Unlock()
		if _, twice := found[i.Ino]; twice {
			t.Errorf("inode %d came twice", i.Ino)
		}
		found[i.Ino] = inode{i.GID, i.Mode}
		return true
	})
	return found, err
}

// makeTree makes files of the kinds that a volume may have, and returns those that have names.
func makeTree(t testing.TB, dir string) map[uint64]inode {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range 200 {
		sub := filepath.Join(dir, fmt.Sprint("d", i))
		must(os.Mkdir(sub, 0o750))
		for j := range 30 {
			name := filepath.Join(sub, fmt.Sprint("f", j))
			must(os.WriteFile(name, []byte("x"), 0o640))
			must(os.Chown(name, 0, 70000+j)) // more than 16 bits
		}
	}
	must(os.Symlink("/nowhere", filepath.Join(dir, "link")))
	must(os.Link(filepath.Join(dir, "d0/f0"), filepath.Join(dir, "second name")))
	must(syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	for i := range 50 { // inodes that are freed again
		must(os.RemoveAll(filepath.Join(dir, fmt.Sprint("d", 2*i))))
	}
	// With ea_inode, a value too large for the inode has an inode of its own.
	_ = syscall.Setxattr(filepath.Join(dir, "d1/f1"), "user.large", bytes.Repeat([]byte("v"), 6000), 0)
	want := map[uint64]inode{}
	must(filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		want[st.Ino] = inode{st.Gid, uint16(st.Mode)}
		return nil
	}))
	return want
}

func TestExt4InodesTellWhatAWalkTells(t *testing.T) {
	for name, options := range map[string][]string{
		"default":        nil,
		"small blocks":   {"-b", "1024"},
		"small inodes":   {"-I", "128"},
		"32-bit":         {"-O", "^64bit,^metadata_csum"},
		"no flex groups": {"-O", "^flex_bg,ea_inode"},
		"orphan file":    {"-O", "orphan_file"},
		"lazy":           {"-E", "lazy_itable_init=1"},
	} {
		t.Run(name, func(t *testing.T) {
			img := filepath.Join(t.TempDir(), "img")
			if err := os.WriteFile(img, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(img, 300<<20); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("mkfs.ext4", append(append([]string{"-q"}, options...), img)...).CombinedOutput(); err != nil {
				t.Fatalf("%v %s", err, out)
			}
			dir := t.TempDir()
			mount := func(program string, args ...string) {
				t.Helper()
				if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
					t.Fatalf("%s: %v %s", program, err, out)
				}
			}
			out, err := exec.Command("losetup", "-f", "--show", img).Output()
			if err != nil {
				t.Fatalf("losetup: %v", err)
			}
			device := strings.TrimSpace(string(out))
			t.Cleanup(func() { _ = exec.Command("umount", "-q", dir).Run(); mount("losetup", "-d", device) })
			mount("mount", device, dir)
			want := makeTree(t, dir)
			mount("umount", dir)
			// Read the device, not its file: if another mount namespace still has the mount,
			// the file system has not been written back yet.
			f, err := os.Open(device)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			got, err := collect(t, f, 300<<20)
			if err != nil {
				t.Fatal(err)
			}
			for ino, w := range want {
				if got[ino] != w {
					t.Errorf("inode %d: %+v, a walk says %+v", ino, got[ino], w)
				}
			}
			for ino := range got {
				if _, ok := want[ino]; !ok {
					t.Errorf("inode %d: no name leads to it", ino)
				}
			}
		})
	}
}
