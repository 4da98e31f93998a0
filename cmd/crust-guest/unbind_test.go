package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// A sub-path whose directory was replaced is bound on top of the one before, once for each
// container.
func TestC15_EveryLayerOfASubPathIsUnbound(t *testing.T) {
	s := &server{dir: t.TempDir()}
	place := filepath.Join(s.dir, "binds", "serial", "x")
	if err := os.MkdirAll(place, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := linux.Mount("layer", place, "tmpfs", false, ""); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for linux.Unmount(place) == nil {
		}
	})
	if err := s.unbind("serial"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Dir(place)); !os.IsNotExist(err) {
		t.Errorf("left: %v", err)
	}
}
