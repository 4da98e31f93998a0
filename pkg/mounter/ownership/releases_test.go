package ownership

import (
	"os"
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
)

func TestTheAttributeOfReleasesIsRead(t *testing.T) {
	names := recordtest.Files(t, "ownership")
	if len(names) == 0 {
		t.Error("no fixtures")
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		r, err := ParseRecord(string(b))
		if err != nil || r != (Record{Group: 2000, Clean: true}) || r.String() != string(b) {
			t.Errorf("%s says %q, and is read as %v: %v", name, b, r, err)
		}
	}
}
