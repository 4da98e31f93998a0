package linux

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A file that somebody else has open is told from one that nobody has, however they opened it.
func TestAlone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	check(t, os.WriteFile(path, make([]byte, 1<<20), 0o600))
	check(t, os.Link(path, path+"-too"))
	f, err := Open(path, os.O_RDWR)
	check(t, err)
	defer f.Close()
	is := func(want bool, what string) {
		t.Helper()
		if alone, err := Alone(f); err != nil || alone != want {
			t.Errorf("%s: alone %v, %v", what, alone, err)
		}
	}
	is(true, "nobody else")
	for what, flags := range map[string]int{"a reader": os.O_RDONLY, "a writer": os.O_RDWR} {
		other, err := Open(path+"-too", flags)
		check(t, err)
		is(false, what+" by another name")
		check(t, other.Close())
		is(true, "after "+what)
	}
	// If Alone had kept the lease, this would fail with EAGAIN.
	other, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	check(t, err)
	check(t, other.Close())
}
