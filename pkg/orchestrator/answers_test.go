package orchestrator

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/record"
)

// These are no fuzz targets: compiling this package's dependencies for fuzzing takes minutes. The
// parsers are fuzzed in internal/record and pkg/crust.

// A record is the complete deferral of the target in its name, or that target counts as one whose
// record is unusable. The file is not changed, unless it is of an earlier boot.
func TestA10_ARecordIsOfItsTarget(t *testing.T) {
	whole, err := deferralType.Encode(Deferral{
		Pod: PodKey{"ns", "p", "u"}, VolumeID: "v", Volume: "pv", Target: "/t", Socket: "unix:///s", Filesystems: []string{"ext4"},
		Source: "/dev/loop1", Type: "ext4",
		Options: map[string]string{"commit": "5", "ro": ""}, Sandbox: "box", Published: true, BootID: "boot",
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		target  string
		content []byte
		known   bool
	}{
		{"/t", whole, true},
		{"/other", whole, false},
		{"/t", whole[:len(whole)-5], false},
		{"/t", bytes.Replace(whole, []byte(`"bootID": "boot"`), []byte(`"bootID": "before"`), 1), false},
		{"/t", bytes.Replace(whole, []byte(`"version": 1`), []byte(`"version": 2`), 1), false},
	} {
		target, content := c.target, c.content
		dir := t.TempDir()
		path := filepath.Join(dir, record.Name(target)+record.Extension)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := LoadRecords(dir, "boot")
		if r == nil {
			t.Fatal(err)
		}
		now, rerr := os.ReadFile(path)
		d, known := r.Get(target)
		unusable := r.Unusable(target) != nil
		switch {
		case err != nil, unusable, known:
			if rerr != nil || !bytes.Equal(now, content) {
				t.Errorf("the file became %q: %v", now, rerr)
			}
		case !os.IsNotExist(rerr):
			t.Errorf("%q is there (%v), and nobody is told of it", now, rerr)
		}
		if known != c.known || len(r.m) > 0 != known || known && (unusable || d.Target != target || d.BootID != "boot") {
			t.Errorf("the target %q has %+v of %+v, unusable: %v", target, d, r.m, unusable)
		}
	}
}
