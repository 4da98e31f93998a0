package qemu

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// C12: what came with the guests' image is known before one has run, and after a restart.
func TestC12_KnownBeforeTheFirstGuest(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "image.json")
	know := func(text string) error {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		b, err := New(filepath.Join(dir, "state"), 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		return b.Know(file)
	}
	systems := func() []string {
		t.Helper()
		b, err := New(filepath.Join(dir, "state"), 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := b.FileSystems(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := systems(); len(got) != 0 {
		t.Errorf("%v, of no guest", got)
	}
	for _, bad := range []string{"", "{}", `{"kernel": "6.1"}`, `{"fileSystems": ["a"]}`, "[]"} {
		if know(bad) == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if err := know(`{"kernel": "6.1", "fileSystems": ["ext4", "xfs"]}`); err != nil {
		t.Fatal(err)
	}
	if got := systems(); !slices.Equal(got, []string{"ext4", "xfs"}) {
		t.Errorf("%v", got)
	}
	// An update of the image.
	if err := know(`{"kernel": "6.2", "fileSystems": ["btrfs"]}`); err != nil {
		t.Fatal(err)
	}
	if got := systems(); !slices.Equal(got, []string{"btrfs"}) {
		t.Errorf("%v, after an update", got)
	}
}
