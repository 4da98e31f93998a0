package mounter

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A link that stays below the kubelet's directory is as dangerous as one that leads out: a pod
// that can create one could have another pod's volume, or its own, mounted at a path other than
// the requested one.
func TestD05_ALinkThatStaysInsideIsNotFollowed(t *testing.T) {
	r := openRoot(t)
	check(t, os.MkdirAll(r.Path()+"/pods/a/volumes", 0o755))
	for link, to := range map[string]string{"b": "a", "c": r.Path() + "/pods/a", "d": "../pods/a", "e": "/proc/self/cwd"} {
		check(t, os.Symlink(to, r.Path()+"/pods/"+link))
		target, err := r.Target(r.Path() + "/pods/" + link + "/volumes/mount")
		if !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "symbolic link") {
			t.Errorf("%s -> %s: %v", link, to, err)
			target.Close()
		}
	}
	// Not as the last directory either.
	check(t, os.Symlink("volumes", r.Path()+"/pods/a/link"))
	if target, err := r.Target(r.Path() + "/pods/a/link/mount"); err == nil {
		t.Error("the last directory may be a link")
		target.Close()
	}
}

// After a mount the path is resolved again. A link from it to the mount is not sufficient.
func TestD05_APathThatBecameALinkLeadsNowhere(t *testing.T) {
	r := openRoot(t)
	check(t, os.Mkdir(r.Path()+"/pod", 0o755))
	check(t, os.Mkdir(r.Path()+"/pod/mount", 0o755))
	target, err := r.Target(r.Path() + "/pod/mount")
	check(t, err)
	defer target.Close()
	place, err := target.Look()
	check(t, err)
	id := place.stat.MountID
	place.Close()
	if leads, err := target.leadsTo(id); !leads || err != nil {
		t.Errorf("as it was: %v %v", leads, err)
	}
	check(t, os.Rename(r.Path()+"/pod", r.Path()+"/aside"))
	check(t, os.Symlink("aside", r.Path()+"/pod"))
	if leads, err := target.leadsTo(id); leads || err != nil {
		t.Errorf("through a link: %v %v", leads, err)
	}
	check(t, os.Remove(r.Path()+"/pod"))
	if leads, err := target.leadsTo(id); leads || err != nil {
		t.Errorf("gone: %v %v", leads, err)
	}
}

// If the target's directory was moved during the call, the mount is removed again, and the
// caller gets an error.
func TestD05_ATargetThatMovedIsNotMountedOn(t *testing.T) {
	d, r := formatted(t, "ext4"), openRoot(t)
	check(t, os.Mkdir(r.Path()+"/pod", 0o755))
	target, err := r.Target(r.Path() + "/pod/mount")
	check(t, err)
	defer target.Close()
	check(t, os.Rename(r.Path()+"/pod", r.Path()+"/aside"))
	check(t, os.Mkdir(r.Path()+"/pod", 0o755))
	m, err := Open(Filesystem{Device: d, Type: "ext4"})
	check(t, err)
	err = m.Attach(target)
	if !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "taken off again") {
		t.Errorf("%v", err)
	}
	check(t, m.Close())
	if info, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(info), r.Path()) {
		t.Errorf("it is mounted: %v\n%s", err, info)
		unmountAt(t, r, "aside/mount")
	}
}

// An object that somebody else creates between the check and the creation is not used.
func TestD05_WhatWasPutThereMeanwhileIsNotTaken(t *testing.T) {
	r, outside := openRoot(t), filepath.Join(t.TempDir(), "outside")
	target, err := r.Target(r.Path() + "/device")
	check(t, err)
	defer target.Close()
	check(t, os.WriteFile(r.Path()+"/device", []byte("theirs"), 0o600))
	if err := target.create(false); !errors.Is(err, linux.EEXIST) {
		t.Errorf("over a file: %v", err)
	}
	check(t, os.Remove(r.Path()+"/device"))
	check(t, os.Symlink(outside, r.Path()+"/device"))
	if s, err := target.Look(); err != nil || s.Occupant != Symlink {
		t.Errorf("a link is taken for %+v %v", s, err)
	} else {
		s.Close()
	}
	if err := target.create(false); err == nil {
		t.Error("over a link")
	}
	if _, err := os.Lstat(outside); err == nil {
		t.Error("it was made where the link leads")
	}
}

func TestD05_OthersThatFollowNoLink(t *testing.T) {
	d := formatted(t, "ext4")
	dir := t.TempDir()
	link := d
	link.Path = filepath.Join(dir, "device")
	check(t, os.Symlink(d.Path, link.Path))
	if m, err := OpenDevice(link); err == nil {
		t.Error("a device by a link")
		m.Close()
	}
	check(t, os.Mkdir(dir+"/real", 0o755))
	check(t, os.Symlink("real", dir+"/link"))
	if m, err := OpenTree(dir + "/link"); !errors.Is(err, linux.ELOOP) {
		t.Errorf("a tree by a link: %v", err)
		m.Close()
	}
	if err := ClearScratch(dir + "/link"); !errors.Is(err, linux.ELOOP) {
		t.Errorf("a scratch directory by a link: %v", err)
	}
	// The administrator may use links in the path of the root itself.
	r, err := OpenRoot(dir + "/link")
	check(t, err)
	check(t, r.Close())
}

// optionsAt returns the options of the mount in the kernel's table.
func optionsAt(t *testing.T, path string) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	check(t, err)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[4] == path {
			return strings.Split(f[5], ",")
		}
	}
	t.Fatalf("nothing is mounted at %s", path)
	return nil
}

// Each mount option has the effect documented in mount(8), and its opposite reverts it.
func TestEachOptionOfAMountReachesTheKernel(t *testing.T) {
	d, r := formatted(t, "ext4"), openRoot(t)
	for _, c := range []struct {
		option, shown string
		not           []string
	}{
		{"defaults", "relatime", []string{"ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "nosymfollow"}},
		{"ro", "ro", []string{"rw"}},
		{"nosuid", "nosuid", []string{"nodev", "noexec"}},
		{"nodev", "nodev", []string{"nosuid", "noexec"}},
		{"noexec", "noexec", []string{"nosuid", "nodev"}},
		{"nodiratime", "nodiratime", []string{"noatime"}},
		{"nosymfollow", "nosymfollow", []string{"nodev"}},
		{"noatime", "noatime", []string{"relatime"}},
		{"strictatime", "rw", []string{"relatime", "noatime"}},
		{"relatime", "relatime", []string{"noatime"}},
		{"atime", "relatime", []string{"noatime"}},
	} {
		o, err := ParseOptions([]string{c.option})
		check(t, err)
		mountAt(t, r, Filesystem{Device: d, Type: "ext4", Options: o, ReadOnly: o.ReadOnly()}, "m")
		got := optionsAt(t, r.Path()+"/m")
		if !slices.Contains(got, c.shown) {
			t.Errorf("%s: the mount has %v", c.option, got)
		}
		for _, n := range c.not {
			if slices.Contains(got, n) {
				t.Errorf("%s: the mount has %v, with %s", c.option, got, n)
			}
		}
		unmountAt(t, r, "m")
	}
	// A view of the same file system without the options of the first.
	o, err := ParseOptions([]string{"nosuid,nodev,noexec,nodiratime,nosymfollow,noatime"})
	check(t, err)
	m, err := Open(Filesystem{Device: d, Type: "ext4", Options: o})
	check(t, err)
	plain, err := ParseOptions([]string{"suid,dev,exec,diratime,symfollow,relatime"})
	check(t, err)
	check(t, m.Change(View{Options: plain}))
	target, err := r.Target(r.Path() + "/m")
	check(t, err)
	defer target.Close()
	check(t, errors.Join(m.Attach(target), m.Close()))
	defer unmountAt(t, r, "m")
	if got := optionsAt(t, r.Path()+"/m"); !slices.Equal(got, []string{"rw", "relatime"}) {
		t.Errorf("taken back, and there is %v", got)
	}
}

// A placeholder has no content, takes no writes, and cannot be bound elsewhere.
func TestWhatAPlaceholderRefuses(t *testing.T) {
	r := openRoot(t)
	target, err := r.Target(r.Path() + "/m")
	check(t, err)
	defer target.Close()
	check(t, AttachPlaceholder(target))
	defer unmountAt(t, r, "m")
	got := optionsAt(t, r.Path()+"/m")
	for _, want := range []string{"ro", "nosuid", "nodev", "noexec"} {
		if !slices.Contains(got, want) {
			t.Errorf("it has %v, not %s", got, want)
		}
	}
	if m, err := OpenTree(r.Path() + "/m"); !errors.Is(err, linux.EINVAL) {
		t.Errorf("it can be bound: %v", err)
		m.Close()
	}
}
