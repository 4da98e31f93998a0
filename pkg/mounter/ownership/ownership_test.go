package ownership

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// newTree makes a directory with files of every kind: deep, wide, with
// hard links, symbolic links, setuid programs and names that no shell prints.
func newTree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for i := range 20 {
		sub := filepath.Join(dir, fmt.Sprintf("d%d", i), "sub", "sub")
		check(t, os.MkdirAll(sub, 0o755))
		for j := range 20 {
			check(t, os.WriteFile(filepath.Join(sub, fmt.Sprintf("f%d", j)), nil, 0o600))
		}
	}
	check(t, os.WriteFile(filepath.Join(dir, "a\nb\xff \t*"), nil, 0o604))
	check(t, os.WriteFile(filepath.Join(dir, "suid"), nil, 0o755))
	check(t, os.Chmod(filepath.Join(dir, "suid"), 0o755|os.ModeSetuid))
	for i := range 8 {
		check(t, os.Link(filepath.Join(dir, "suid"), filepath.Join(dir, fmt.Sprintf("d%d", i), "link")))
	}
	check(t, syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	return dir
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func apply(t testing.TB, dir string, gid uint32, policy Policy) Result {
	t.Helper()
	r, err := try(t.Context(), dir, gid, policy)
	check(t, err)
	return r
}

func try(ctx context.Context, dir string, gid uint32, policy Policy) (Result, error) {
	root, err := os.Open(dir)
	if err != nil {
		return Result{}, err
	}
	defer root.Close()
	return Apply(ctx, root, gid, policy, Inodes{}, &Progress{})
}

func stat(t testing.TB, path string) *syscall.Stat_t {
	t.Helper()
	var st syscall.Stat_t
	check(t, syscall.Lstat(path, &st))
	return &st
}

func wantTree(t *testing.T, dir string, gid uint32) (files int64) {
	t.Helper()
	check(t, filepath.Walk(dir, func(path string, i os.FileInfo, err error) error {
		check(t, err)
		files++
		st := stat(t, path)
		if st.Gid != gid {
			t.Errorf("%q has group %d", path, st.Gid)
		}
		switch {
		case i.IsDir() && st.Mode&0o2770 != 0o2770:
			t.Errorf("directory %q has mode %o", path, st.Mode)
		case i.Mode()&os.ModeSymlink == 0 && st.Mode&0o660 != 0o660:
			t.Errorf("%q has mode %o", path, st.Mode)
		}
		return nil
	}))
	return files
}

func TestF02_EveryFileGetsTheGroup(t *testing.T) {
	dir := newTree(t)
	outside := filepath.Join(t.TempDir(), "outside")
	check(t, os.WriteFile(outside, nil, 0o600))
	check(t, os.Symlink(outside, filepath.Join(dir, "link")))
	before := *stat(t, outside)
	r := apply(t, dir, 4242, OnRootMismatch)
	wantTree(t, dir, 4242)
	if after := *stat(t, outside); after.Gid != before.Gid || after.Mode != before.Mode || after.Ctim != before.Ctim {
		t.Error("what a symbolic link leads to was changed")
	}
	if st := stat(t, filepath.Join(dir, "suid")); st.Mode&0o7777 != 0o4775 {
		t.Errorf("the setuid program has mode %o", st.Mode&0o7777)
	}
	if st := stat(t, filepath.Join(dir, "a\nb\xff \t*")); st.Mode&0o7777 != 0o664 {
		t.Errorf("mode %o, want what others may do unchanged", st.Mode&0o7777)
	}
	// 1 top, 20×3 directories, 400 files, 3 files and a link at the top; the hard links once.
	if want := int64(1 + 60 + 400 + 4); r.Looked != want || r.Changed != want {
		t.Errorf("%+v, want %d looked at and changed", r, want)
	}
}

func TestF03_AMatchingRecordSkipsTheWalk(t *testing.T) {
	dir := newTree(t)
	apply(t, dir, 4242, OnRootMismatch)
	check(t, os.Chown(filepath.Join(dir, "fifo"), 0, 7))
	if r := apply(t, dir, 4242, OnRootMismatch); r.Walked {
		t.Errorf("walked: %+v", r)
	}
	// Somebody else changed the top directory.
	check(t, os.Chown(dir, 0, 7))
	if r := apply(t, dir, 4242, OnRootMismatch); !r.Walked || r.Changed != 2 {
		t.Errorf("%+v, want the top and the fifo mended", r)
	}
	if r := apply(t, dir, 99, OnRootMismatch); !r.Walked {
		t.Errorf("another group did not walk: %+v", r)
	}
	wantTree(t, dir, 99)
}

func TestF05_AlwaysLooksAndMends(t *testing.T) {
	dir := newTree(t)
	apply(t, dir, 4242, Always)
	wrong := filepath.Join(dir, "d3/sub/sub/f7")
	check(t, os.Chown(wrong, 1, 1))
	right := *stat(t, filepath.Join(dir, "d3/sub/sub/f8"))
	top := *stat(t, dir)
	if r := apply(t, dir, 4242, Always); r.Changed != 1 || r.Looked < 400 {
		t.Errorf("%+v", r)
	}
	if st := stat(t, wrong); st.Uid != 1 || st.Gid != 4242 {
		t.Errorf("%d:%d", st.Uid, st.Gid)
	}
	if after := *stat(t, filepath.Join(dir, "d3/sub/sub/f8")); after.Ctim != right.Ctim {
		t.Error("a file that was right was touched")
	}
	top = *stat(t, dir)
	if r := apply(t, dir, 4242, Always); r.Changed != 0 {
		t.Errorf("%+v", r)
	}
	if after := *stat(t, dir); after.Ctim != top.Ctim {
		t.Error("a volume that was right was touched")
	}
}

func TestF04_ADirtyRecordIsNotTrusted(t *testing.T) {
	dir := newTree(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the caller left")
	cancel(cause)
	if _, err := try(ctx, dir, 4242, OnRootMismatch); !errors.Is(err, cause) {
		t.Fatalf("got %v", err)
	}
	// The state that a kill during the walk leaves, although the top directory looks right.
	check(t, os.Chown(dir, 0, 4242))
	check(t, os.Chmod(dir, 0o770|os.ModeSetgid))
	check(t, syscall.Setxattr(dir, Attribute, []byte(Record{Group: 4242}.String()), 0))
	if r := apply(t, dir, 4242, OnRootMismatch); !r.Walked {
		t.Error("a dirty record was believed")
	}
	wantTree(t, dir, 4242)
	root, err := os.Open(dir)
	check(t, err)
	defer root.Close()
	if r, ok, err := State(root); err != nil || !ok || r != (Record{Group: 4242, Clean: true}) {
		t.Errorf("%v %v %v", r, ok, err)
	}
}

func TestADeepTree(t *testing.T) {
	dir := t.TempDir()
	// Deeper than PATH_MAX: made relative to its directory, as a pod would.
	script := `chdir $ARGV[0]; for (1..1200) { mkdir "deeper"; chdir "deeper" or die } open F, ">end" or die`
	if out, err := exec.Command("perl", "-e", script, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	defer func() {
		if out, err := exec.Command("rm", "-rf", filepath.Join(dir, "deeper")).CombinedOutput(); err != nil {
			t.Errorf("%v %s", err, out)
		}
	}()
	if r := apply(t, dir, 4242, OnRootMismatch); r.Looked != 1202 || r.Changed != 1202 {
		t.Errorf("%+v", r)
	}
	if r := apply(t, dir, 4242, Always); r.Changed != 0 {
		t.Errorf("%+v", r)
	}
}

func TestRecordsOfOtherVersionsAreRefused(t *testing.T) {
	dir := newTree(t)
	for _, text := range []string{"v2 group=1 state=clean", "nonsense", "v1 group=01 state=clean", "v1 group=1 state=odd", ""} {
		check(t, syscall.Setxattr(dir, Attribute, []byte(text), 0))
		if _, err := try(t.Context(), dir, 4242, OnRootMismatch); err == nil || !strings.Contains(err.Error(), "record") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func FuzzRecord(f *testing.F) {
	f.Add("v1 group=2000 state=clean")
	f.Add("v1 group=4294967295 state=dirty")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRecord(text)
		if err == nil && r.String() != text {
			t.Errorf("%q reads as %q", text, r)
		}
	})
}

func FuzzGroup(f *testing.F) {
	f.Add("0")
	f.Add("-1")
	f.Fuzz(func(t *testing.T, text string) {
		if gid, err := ParseGroup(text); err == nil && fmt.Sprint(gid) != text {
			t.Errorf("%q reads as %d", text, gid)
		}
	})
}

// chown(2) takes the largest number as "unchanged", so a record of it would name no group.
func TestTheLargestNumberIsNoGroup(t *testing.T) {
	root, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if _, err := Apply(t.Context(), root, 1<<32-1, Always, Inodes{}, nil); !fault.Is(err, fault.Invalid) {
		t.Errorf("%v", err)
	}
	if r, ok, err := State(root); ok || err != nil {
		t.Errorf("there is the record %v, %v", r, err)
	}
}

// A misspelt policy changes nothing: the caller would not notice that files are, or are not,
// examined.
func TestAnUnknownPolicyIsRefused(t *testing.T) {
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "f"), nil, 0o600))
	root, err := os.Open(dir)
	check(t, err)
	defer root.Close()
	before := stat(t, filepath.Join(dir, "f")).Gid
	for _, policy := range []Policy{"", "always", "OnRootMissmatch"} {
		if _, err := Apply(t.Context(), root, before+1, policy, Inodes{}, nil); !fault.Is(err, fault.Invalid) {
			t.Errorf("Apply with %q: %v", policy, err)
		}
		if due, err := Due(root, before+1, policy); due || !fault.Is(err, fault.Invalid) {
			t.Errorf("Due with %q: %v, %v", policy, due, err)
		}
	}
	if now := stat(t, filepath.Join(dir, "f")).Gid; now != before {
		t.Errorf("the file has group %d, and had %d", now, before)
	}
}
