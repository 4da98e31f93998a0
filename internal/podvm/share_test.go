package podvm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/podguest"
)

// tmpfs mounts a file system on a directory, until the end of the test.
func tmpfs(t *testing.T, dir string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(dir, 0o755), linux.Mount("tmpfs", dir, "tmpfs", false, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := detach(dir); err != nil {
			t.Error(err)
		}
	})
}

func propagates(t *testing.T, dir string, how uint64) {
	t.Helper()
	f, err := linux.Open(dir, linux.OPath)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := linux.MountSetattr(f, linux.MountAttr{Propagation: how}, false); err != nil {
		t.Fatal(err)
	}
}

func mounted(t *testing.T, dir string) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(b), " "+dir+" ")
}

// The guest's kernel, which is the tenant's, cannot change the paths that root walks on the host.
func TestC24_AGuestCannotChangeWhatTheHostWalks(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	source := t.TempDir()
	if err := errors.Join(p.add("one"), p.share("one", "1", source, access{})); err != nil {
		t.Fatal(err)
	}
	shared := p.at("shared") // virtiofsd serves this
	for what, err := range map[string]error{
		"a directory that looks like a container": os.Mkdir(filepath.Join(shared, "two"), 0o755),
		"a link":                        os.Symlink("/etc", filepath.Join(shared, "one", "link")),
		"a container's directory moves": os.Rename(filepath.Join(shared, "one"), filepath.Join(shared, "three")),
		"a file that fills /run":        os.WriteFile(filepath.Join(shared, "big"), nil, 0o644),
	} {
		if !errors.Is(err, linux.EROFS) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// In what its containers may write, it may.
	if err := os.Symlink("/etc", filepath.Join(shared, "one", "1", "link")); err != nil {
		t.Error(err)
	}
	if err := p.drop("one"); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(source, "link")); err != nil {
		t.Error(err)
	}
}

// What a container is given is a copy of the host's mounts: its end unmounts nothing on the host, and a mount that comes later is not in
// it, where it would be writable.
func TestC24_TheEndOfAContainerUnmountsNothingOnTheHost(t *testing.T) {
	host := filepath.Join(t.TempDir(), "host")
	tmpfs(t, host)
	propagates(t, host, linux.PropagationShared) // as the root directory of a machine with systemd
	sub := filepath.Join(host, "sub")
	tmpfs(t, sub)
	p := made(t, Pods{t.TempDir()}, "pod")
	if err := p.add("one"); err != nil {
		t.Fatal(err)
	}
	for name, a := range map[string]access{"plain": {}, "read-only": {readOnly: true, follows: true}, "follows": {follows: true}} {
		if err := p.share("one", name, host, a); err != nil {
			t.Fatal(err)
		}
		if !mounted(t, filepath.Join(p.at("shared"), "one", name, "sub")) {
			t.Errorf("%s: what is mounted below is not there", name)
		}
	}
	err := os.WriteFile(filepath.Join(p.at("shared"), "one", "read-only", "sub", "f"), nil, 0o644)
	if !errors.Is(err, linux.EROFS) {
		t.Errorf("below what is read-only: %v", err)
	}
	later := filepath.Join(host, "later")
	tmpfs(t, later)
	for name, want := range map[string]bool{"plain": false, "read-only": false, "follows": true} {
		if got := mounted(t, filepath.Join(p.at("shared"), "one", name, "later")); got != want {
			t.Errorf("%s: a later mount of the host's is there: %v", name, got)
		}
	}
	if err := p.drop("one"); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{host, sub, later} {
		if !mounted(t, dir) {
			t.Errorf("%s was unmounted on the host", dir)
		}
	}
}

func TestC24_WhatAMountsOptionsMean(t *testing.T) {
	for options, want := range map[string]access{
		"rbind":              {},
		"rbind ro":           {readOnly: true},
		"rbind rro":          {readOnly: true},
		"rbind ro rw":        {},
		"rbind rw rro":       {readOnly: true},
		"rbind rslave":       {follows: true},
		"rbind ro rslave":    {readOnly: true, follows: true},
		"rshared rprivate":   {},
		"rbind rprivate rro": {readOnly: true},
	} {
		var all []any
		for _, o := range strings.Fields(options) {
			all = append(all, o)
		}
		if got, err := accessOf(object{"options": all}); got != want || err != nil {
			t.Errorf("%s: %+v %v", options, got, err)
		}
	}
}

// Containers of a pod that have one file or directory have it in common: virtiofsd tells files apart by device, inode and mount, so the
// guest would not know that two mounts show one file, and locks, sockets and memory maps of one container would be unknown in the other.
func TestC24_WhatContainersHaveInCommonIsOneMount(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	volume, other := t.TempDir(), t.TempDir()
	have := func(container, source string, a access) string {
		t.Helper()
		at, err := p.shareCommon(container, source, a)
		if err != nil {
			t.Fatal(err)
		}
		if !mounted(t, filepath.Join(p.at("shared"), at)) {
			t.Errorf("%s: nothing is mounted at %s", container, at)
		}
		return at
	}
	for _, c := range []string{"one", "two", "three"} {
		if err := p.add(c); err != nil {
			t.Fatal(err)
		}
	}
	reads := have("three", volume, access{readOnly: true}) // before anybody writes: the guest's kernel may not
	if err := os.WriteFile(filepath.Join(p.at("shared"), reads, "f"), nil, 0o644); !errors.Is(err, linux.EROFS) {
		t.Errorf("the guest writes what its container may only read: %v", err)
	}
	first := have("one", volume, access{})
	for what, got := range map[string]string{
		"two, which writes": have("two", volume, access{}), "two, which reads": have("two", volume, access{readOnly: true}),
		"one, elsewhere": have("one", volume, access{}),
	} {
		if got != first {
			t.Errorf("%s: %s, not %s", what, got, first)
		}
	}
	for what, got := range map[string]string{
		"another directory": have("one", other, access{}), "what follows": have("one", volume, access{follows: true}), "the reader": reads,
	} {
		if got == first {
			t.Errorf("%s is the same mount", what)
		}
	}
	if err := p.drop("one"); err != nil {
		t.Fatal(err)
	}
	if !mounted(t, filepath.Join(p.at("shared"), first)) {
		t.Error("the end of one container took the other's")
	}
	if err := p.drop("two"); err != nil {
		t.Fatal(err)
	}
	if left, err := entries(p.at("tree/" + podguest.Common)); err != nil || len(left) != 1 || filepath.Base(reads) != left[0] {
		t.Errorf("%q is left, %v", left, err)
	}
	if err := p.add("four"); err != nil {
		t.Fatal(err)
	}
	if again := have("four", volume, access{}); again == first {
		t.Error("a new mount has the path of an old one, which the guest may remember")
	}
}
