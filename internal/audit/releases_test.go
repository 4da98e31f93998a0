package audit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
)

func TestTheLogOfReleasesIsRead(t *testing.T) {
	names := recordtest.Files(t, "audit")
	if len(names) == 0 {
		t.Error("no fixtures")
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
		events, torn, err := Read(filepath.Dir(name))
		if err != nil || torn > 0 || len(events) != len(lines) {
			t.Fatalf("%s: %d events of %d lines, %d torn, %v", name, len(events), len(lines), torn, err)
		}
		for i, line := range lines {
			recordtest.Same(t, name, []byte(line), events[i])
		}
	}
}
