package microvm

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
)

func TestRecordsOfReleasesAreRead(t *testing.T) {
	recordtest.Read[verdict](t, verdicts)
}

func TestMachinesOfReleasesAreFound(t *testing.T) {
	names := recordtest.Files(t, "microvm")
	if len(names) == 0 {
		t.Error("no fixtures")
	}
	for _, name := range names {
		fixture, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		vm, err := Load(filepath.Dir(name))
		if err != nil {
			t.Fatal(err)
		}
		recordtest.Same(t, name, fixture, vm)
	}
}
