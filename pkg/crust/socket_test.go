package crust_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// A stopped server leaves its socket: otherwise drain-check would take the node for empty.
func TestTheSocketOfAServerThatStoppedStays(t *testing.T) {
	dir, err := os.MkdirTemp("", "s") // short: a socket's path has at most 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "socket")
	defer func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	}()
	for range 2 { // the next replaces the stale socket
		l, err := crust.Listen("unix://"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
}
