package crust_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// A node whose server has stopped is not a node without one: drain-check would call it empty.
func TestTheSocketOfAServerThatStoppedStays(t *testing.T) {
	dir, err := os.MkdirTemp("", "s") // short: the path of a socket has 108 bytes
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
	for range 2 { // the next one takes it over
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
