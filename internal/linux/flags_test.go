package linux

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The purpose of each system call flag: without it, one of these tests fails.

var unixEpoch = time.Unix(1000, 0)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// playground returns a directory in which mounts are made and taken off again.
func playground(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "flags-")
	check(t, err)
	check(t, PrivateMount(dir))
	t.Cleanup(func() {
		check(t, Unmount(dir)) // and everything below
		check(t, os.RemoveAll(dir))
	})
	return dir
}

func tmpfs(t *testing.T, at string) {
	t.Helper()
	check(t, os.MkdirAll(at, 0o755))
	check(t, Mount("flags", at, "tmpfs", false, ""))
}

func put(t *testing.T, path string) {
	t.Helper()
	check(t, os.WriteFile(path, []byte("x"), 0o644))
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

func opened(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := Open(path, OPath)
	check(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func TestD05_HowPathsAreResolved(t *testing.T) {
	dir := playground(t)
	tmpfs(t, dir+"/in/fs")
	put(t, dir+"/outside")
	put(t, dir+"/in/f")
	check(t, os.Symlink("f", dir+"/in/link"))
	in := opened(t, dir+"/in")
	for _, c := range []struct {
		path    string
		resolve uint64
		want    error
	}{
		{"f", ResolveBeneath | ResolveNoSymlinks | ResolveNoMagic | ResolveNoXdev, nil},
		{"../outside", ResolveBeneath, EXDEV},
		{dir + "/outside", ResolveBeneath, EXDEV},
		{"link", ResolveBeneath, nil},
		{"link", ResolveNoSymlinks, ELOOP},
		{"/proc/self/root/" + dir + "/outside", 0, nil},
		{"/proc/self/root/" + dir + "/outside", ResolveNoMagic, ELOOP},
		{"fs", ResolveNoXdev, EXDEV},
	} {
		f, err := Openat2(in, c.path, OPath, c.resolve)
		if !errors.Is(err, c.want) {
			t.Errorf("%s with %#x: %v, want %v", c.path, c.resolve, err, c.want)
		}
		if err == nil {
			f.Close()
		}
	}
	for flag, path := range map[int]string{ODirectory: "f", OExcl | os.O_CREATE: "f", OExcl | os.O_CREATE | os.O_WRONLY: "link"} {
		if f, err := Openat(in, path, flag, 0o600); err == nil {
			t.Errorf("%s was opened with %#x", path, flag)
			f.Close()
		}
	}
	if f, err := Openat(in, "link", os.O_RDONLY|ONofollow, 0); !errors.Is(err, ELOOP) {
		t.Errorf("a link was followed: %v", err)
		f.Close()
	}
}

// A program that is started meanwhile inherits none of them.
func TestEveryDescriptorIsClosedOnExec(t *testing.T) {
	dir := playground(t)
	in := opened(t, dir)
	f := func(f *os.File, err error) *os.File { t.Helper(); check(t, err); return f }
	ctx := f(Fsopen("tmpfs"))
	check(t, FsconfigCreate(ctx))
	mount := f(Fsmount(ctx, 0))
	check(t, MoveMount(mount, in))
	all := map[string]*os.File{
		"fsopen": ctx, "fsmount": mount, "open_tree": f(OpenTreeClone(mount)), "open_tree, recursive": f(OpenTreeCloneRecursive(mount)),
		"open": f(Open(dir, OPath)), "openat": f(Openat(in, ".", OPath, 0)), "openat2": f(Openat2(in, ".", OPath, 0)),
		"memfd": f(Memfd("x")), "bounded memfd": f(BoundedMemfd("x", 1)),
		"temporary file": f(TempFile(dir, 1)), "pidfd": f(ProcessEnd(os.Getpid())),
	}
	if clone, err := OpenTreeAttr(mount, MountAttr{}); !errors.Is(err, ENOSYS) {
		all["open_tree_attr"] = f(clone, err)
	}
	for name, f := range all {
		if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("%s: flags %#x, %v", name, flags, err)
		}
		f.Close()
	}
	check(t, Unmount(dir)) // the tmpfs
}

func TestAMountIsFoundByItsNameAndNotThroughALink(t *testing.T) {
	dir := playground(t)
	tmpfs(t, dir+"/m")
	put(t, dir+"/m/f")
	check(t, os.Symlink("m", dir+"/link"))
	in := opened(t, dir)
	if err := UnmountAt(in, "link"); !errors.Is(err, EINVAL) || !exists(dir+"/m/f") {
		t.Errorf("by a link, in a directory: %v", err)
	}
	if err := Unmount(dir + "/link"); !errors.Is(err, EINVAL) || !exists(dir+"/m/f") {
		t.Errorf("by a link: %v", err)
	}
	// A mount in use is refused or detached, depending on the call.
	user, err := os.Open(dir + "/m/f")
	check(t, err)
	defer user.Close()
	if err := UnmountAt(in, "m"); !errors.Is(err, EBUSY) {
		t.Errorf("in use: %v", err)
	}
	check(t, DetachFile(opened(t, dir+"/m")))
	if exists(dir + "/m/f") {
		t.Error("it is still there")
	}
	tmpfs(t, dir+"/m")
	user2, err := os.Open(dir + "/m")
	check(t, err)
	defer user2.Close()
	check(t, Unmount(dir+"/m"))
}

func TestR01_AClonedTree(t *testing.T) {
	dir := playground(t)
	tmpfs(t, dir+"/a")
	tmpfs(t, dir+"/a/sub")
	put(t, dir+"/a/sub/f")
	for name, c := range map[string]struct {
		clone func(*os.File) (*os.File, error)
		sub   bool
	}{
		"one":  {OpenTreeClone, false},
		"tree": {OpenTreeCloneRecursive, true},
	} {
		m, err := c.clone(opened(t, dir+"/a"))
		check(t, err)
		check(t, os.Mkdir(dir+"/"+name, 0o755))
		check(t, MoveMount(m, opened(t, dir+"/"+name)))
		m.Close()
		if !exists(dir + "/a/sub/f") {
			t.Errorf("%s: the original is gone: it was moved, not cloned", name)
		}
		if exists(dir+"/"+name+"/sub/f") != c.sub {
			t.Errorf("%s: what is mounted below it is there: %v", name, !c.sub)
		}
		// Read-only: this mount, or all below.
		check(t, MountSetattr(opened(t, dir+"/"+name), MountAttr{Set: MountAttrRdonly}, c.sub))
		if err := os.WriteFile(dir+"/"+name+"/g", nil, 0o600); !errors.Is(err, EROFS) {
			t.Errorf("%s: a write: %v", name, err)
		}
		if err := os.WriteFile(dir+"/"+name+"/sub/g", nil, 0o600); errors.Is(err, EROFS) != c.sub && c.sub {
			t.Errorf("%s: a write below: %v", name, err)
		}
	}
	m, err := OpenTreeCloneRecursive(opened(t, dir+"/a"))
	check(t, err)
	defer m.Close()
	check(t, os.Mkdir(dir+"/plain", 0o755))
	check(t, MoveMount(m, opened(t, dir+"/plain")))
	check(t, MountSetattr(m, MountAttr{Set: MountAttrRdonly}, false))
	if err := os.WriteFile(dir+"/plain/sub/g", nil, 0o600); err != nil {
		t.Errorf("not recursive, and yet read-only below: %v", err)
	}
}

func TestAnUnbindableMountIsNotBound(t *testing.T) {
	dir := playground(t)
	tmpfs(t, dir+"/m")
	m := opened(t, dir+"/m")
	check(t, MakeUnbindable(m))
	if f, err := OpenTreeClone(m); !errors.Is(err, EINVAL) {
		t.Errorf("it was cloned: %v", err)
		f.Close()
	}
}

func TestAPrivateMountPropagatesNothing(t *testing.T) {
	dir := playground(t)
	b, err := os.ReadFile("/proc/self/mountinfo")
	check(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, " "+dir+" ") && strings.Contains(line, "shared:") {
			t.Errorf("it is shared: %s", line)
		}
	}
	// A mount namespace made here is a copy that receives mounts from the original and propagates
	// none back.
	check(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	check(t, os.MkdirAll(dir+"/sub/here", 0o755))
	check(t, os.Mkdir(dir+"/sub/there", 0o755))
	put(t, dir+"/pin")
	pins := t.TempDir()
	// As a process leaves it that is killed half-way, where the parent is shared.
	check(t, unix.Mount(pins, pins, "", unix.MS_BIND, ""))
	check(t, unix.Mount("", pins, "", unix.MS_SHARED, ""))
	check(t, PrivateMount(pins))
	defer func() { check(t, Unmount(pins)) }()
	put(t, pins+"/pin")
	check(t, PinMountNamespace(pins+"/pin"))
	defer func() { check(t, Unmount(pins+"/pin")) }()
	ns, err := Open(pins+"/pin", os.O_RDONLY)
	check(t, err)
	defer ns.Close()
	check(t, Mount("flags", dir+"/sub/here", "tmpfs", false, ""))
	put(t, dir+"/sub/here/f")
	check(t, InMountNamespace(ns, func() error {
		if !exists(dir + "/sub/here/f") {
			t.Error("a mount of the original does not reach the copy")
		}
		err := Mount("flags", dir+"/sub/there", "tmpfs", false, "")
		return errors.Join(err, os.WriteFile(dir+"/sub/there/f", nil, 0o600))
	}))
	if exists(dir + "/sub/there/f") {
		t.Error("a mount of the copy reaches the original")
	}
	check(t, unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	check(t, Unmount(dir+"/sub/here"))
}

// The walk that gives files to a group acts on names, never on link targets.
func TestF02_TheWalkFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	check(t, os.MkdirAll(dir+"/walk/real", 0o755))
	check(t, os.Mkdir(dir+"/outside", 0o755))
	put(t, dir+"/victim")
	check(t, os.Chmod(dir+"/victim", 0o600))
	for link, to := range map[string]string{"dir": "../outside", "file": "../victim"} {
		check(t, os.Symlink(to, filepath.Join(dir, "walk", link)))
	}
	root, err := OpenRootDir(opened(t, dir+"/walk"))
	check(t, err)
	defer func() { check(t, root.Close()) }()
	name := func(s string) Name { return Name(s + "\x00") }
	if d, err := root.Open(name("dir")); err == nil {
		t.Error("a linked directory was entered")
		check(t, d.Close())
	}
	put(t, dir+"/walk/plain")
	if d, err := root.Open(name("plain")); !errors.Is(err, ENOTDIR) {
		t.Errorf("a file was opened as a directory: %v", err)
		check(t, d.Close())
	}
	if i, err := root.Stat(name("file")); err != nil || !i.IsSymlink() {
		t.Errorf("%+v %v", i, err)
	}
	check(t, root.Chgrp(name("file"), 4321))
	if i, err := root.Stat(name("file")); err != nil || i.GID != 4321 {
		t.Errorf("%+v %v", i, err)
	}
	if err := root.Chmod(name("file"), 0o666); err == nil {
		t.Error("a link got a mode")
	}
	if _, err := root.ChangeExactly(name("file"), Inode{}, 4321, 0o666); err != nil {
		t.Error(err)
	}
	told, err := root.Stat(name("file"))
	check(t, err)
	_, _ = root.ChangeExactly(name("file"), told, 4322, 0o666) // a link has no mode, so this may fail
	var st, link unix.Stat_t
	check(t, unix.Stat(dir+"/victim", &st))
	check(t, unix.Lstat(dir+"/walk/file", &link))
	if st.Gid == 4321 || st.Gid == 4322 || st.Mode&0o777 != 0o600 {
		t.Errorf("what the link leads to has group %d and mode %o", st.Gid, st.Mode)
	}
	if link.Gid != 4322 {
		t.Errorf("the link has group %d, not the one that it was given last", link.Gid)
	}
	// It does not change times either, unlike an ordinary read of a directory.
	check(t, os.Chtimes(dir+"/walk/real", unixEpoch, unixEpoch))
	real, err := root.Open(name("real"))
	check(t, err)
	_, err = real.Read(make([]byte, 4096))
	check(t, errors.Join(err, real.Close()))
	check(t, unix.Stat(dir+"/walk/real", &st))
	if st.Atim.Sec != unixEpoch.Unix() {
		t.Errorf("the access time of a directory changed to %d", st.Atim.Sec)
	}
}
