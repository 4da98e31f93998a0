package mounter

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// Other drivers show these errors to their users, who have no page and no stage of csi-node's: what another driver does about it is its own
// to say.
func TestErrorsNameNoDriver(t *testing.T) {
	o, err := ParseOptions([]string{"errors=panic"})
	check(t, err)
	d := formatted(t, "ext4")
	m, err := Open(Filesystem{Device: d, Type: "ext4"})
	check(t, err)
	defer m.Close()
	dir, err := m.Dir()
	check(t, err)
	defer dir.Close()
	check(t, os.Truncate(backing(t, d), 640<<20))
	sh(t, "losetup", "-c", d.Path)
	grown := Grow(dir, "ext4", d)
	if grown != nil && !errors.Is(grown, ErrGrowOffline) {
		t.Fatal(grown)
	}
	for _, err := range []error{CheckOptions("ext4", o), CheckOptions("", o), grown} {
		if err == nil {
			continue // this kernel lets the test grow it
		}
		for _, word := range []string{"docs/", "is grown when", "csi-node", "crustctl"} {
			if strings.Contains(err.Error(), word) {
				t.Errorf("%q: %v", word, err)
			}
		}
	}
}

func backing(t *testing.T, d Device) string {
	t.Helper()
	return strings.TrimSpace(sh(t, "losetup", "-n", "-O", "BACK-FILE", d.Path))
}

// The namespace of this process is a nil one, for its callers too.
func TestNoNamespaceIsThatOfThisProcess(t *testing.T) {
	var n *Namespace
	check(t, n.Do(func() error { return nil }))
	here, err := os.Readlink("/proc/self/ns/mnt")
	check(t, err)
	if there, err := os.Readlink(n.Path()); there != here || err != nil {
		t.Errorf("%s is %s, %v; want %s", n.Path(), there, err, here)
	}
	check(t, n.Close())
}
