package linux

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// InMountNamespace never moves the process's first thread, whose namespaces others take for the
// process's own.
func TestTheFirstThreadStaysWhereItIs(t *testing.T) {
	dir := t.TempDir()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(PrivateMount(dir))
	defer func() { check(Unmount(dir)) }()
	pin := filepath.Join(dir, "pin")
	f, err := os.Create(pin)
	check(err)
	f.Close()
	before, err := os.Readlink("/proc/self/ns/mnt")
	check(err)
	check(PinMountNamespace(pin))
	defer func() { check(Unmount(pin)) }()
	ns, err := Open(pin, os.O_RDONLY)
	check(err)
	defer ns.Close()
	for range 50 {
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				if err := InMountNamespace(ns, func() error {
					now, err := os.Readlink("/proc/thread-self/ns/mnt")
					if err == nil && now == before {
						t.Error("f runs in this namespace")
					}
					return err
				}); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if now, err := os.Readlink("/proc/self/ns/mnt"); err != nil || now != before {
			t.Fatalf("the process is in %s now, and was in %s (%v)", now, before, err)
		}
	}
}
