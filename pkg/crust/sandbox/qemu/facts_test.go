package qemu

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// C20: what guests can was recorded by a newer version. That is not "nothing": the node would mount what its guests should. Nor does a
// tenant's guest say it anew. A file of the guests' image does.
func TestC20_FactsThatCannotBeReadAreNotNone(t *testing.T) {
	dir := t.TempDir()
	b, err := New(dir, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := b.FileSystems(t.Context()); err != nil || len(got) > 0 {
		t.Errorf("before any guest: %q, %v", got, err)
	}
	image := filepath.Join(dir, "image.json")
	if err := os.WriteFile(image, []byte(`{"kernel":"7","fileSystems":["xfs"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, text := range map[string]string{
		"a newer version":               `{"kind":"crust.guest","version":2,"data":{"kernel":"6","fileSystems":["ext4"]}}`,
		"a field that nothing here has": `{"kind":"crust.guest","version":1,"data":{"kernel":"\"7\"","fileSystems":["ext4"],"new":1}}`,
		"nothing":                       ``,
	} {
		if err := os.WriteFile(b.facts(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if b, err = New(dir, time.Minute, nil); err != nil {
			t.Fatal(err)
		}
		if got, err := b.FileSystems(t.Context()); !fault.Is(err, fault.State) {
			t.Errorf("%s: %q, %v", what, got, err)
		}
		if err := b.Know(image); err != nil {
			t.Fatal(err)
		}
		if got, err := b.FileSystems(t.Context()); err != nil || !slices.Equal(got, []string{"xfs"}) {
			t.Errorf("%s, and the image: %q, %v", what, got, err)
		}
	}
}
