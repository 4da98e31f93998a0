// Package recordtest tests that today's program reads the records that releases have written: the
// fixtures in test/skew/testdata.
package recordtest

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// Next is the directory of fixtures that no release has written yet.
const Next = "next"

// Files returns the fixtures of a kind, by release.
func Files(t testing.TB, kind string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(testnode.Root(t), "test/skew/testdata/*", kind, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// Read reads every fixture of a kind into an R, and checks that nothing is lost. Each field of R
// must be in a fixture.
func Read[R any](t *testing.T, kind record.Type) {
	t.Helper()
	names := Files(t, kind.Kind)
	if len(names) == 0 {
		t.Errorf("there is no fixture of %q; CONTRIBUTING.md, \"Skew\", tells how one is made", kind.Kind)
	}
	known := map[string]bool{}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var r R
		if err := kind.Decode(b, &r); err != nil {
			t.Errorf("%s cannot be read any more: %v", name, err)
			continue
		}
		was := content(t, b)
		same(t, name, was, content(t, encoded(t, kind, r)))
		fields(was, "", known)
	}
	var full R
	Fill(&full)
	today := map[string]bool{}
	fields(content(t, encoded(t, kind, full)), "", today)
	for field := range today {
		if !known[field] {
			t.Errorf("no fixture of %q has %s; CONTRIBUTING.md, \"Skew\", tells how one is made", kind.Kind, field)
		}
	}
}

func encoded(t *testing.T, kind record.Type, r any) []byte {
	t.Helper()
	b, err := kind.Encode(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// content returns the data of a record.
func content(t *testing.T, b []byte) map[string]any {
	t.Helper()
	var r struct{ Data map[string]any }
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	return r.Data
}

// Same checks that the value read contains everything in the JSON fixture.
func Same(t *testing.T, name string, fixture []byte, read any) {
	t.Helper()
	again, err := json.Marshal(read)
	if err != nil {
		t.Fatal(err)
	}
	var was, is any
	if err := errors.Join(json.Unmarshal(fixture, &was), json.Unmarshal(again, &is)); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	same(t, name, was, is)
}

func same(t *testing.T, name string, was, is any) {
	t.Helper()
	if lost := missing(was, is, "it"); lost != "" {
		t.Errorf("%s is read otherwise than it was written: %s", name, lost)
	}
}

// fields collects the names that have a value.
func fields(v any, at string, into map[string]bool) {
	m, ok := v.(map[string]any)
	if !ok {
		into[at] = true
		return
	}
	for key, value := range m {
		fields(value, at+"."+key, into)
	}
}

// missing describes what of was is not in is.
func missing(was, is any, at string) string {
	from, ok := was.(map[string]any)
	if !ok {
		if !reflect.DeepEqual(was, is) {
			was, _ := json.Marshal(was) // it was JSON
			is, _ := json.Marshal(is)
			return at + " was " + string(was) + " and is " + string(is)
		}
		return ""
	}
	to, _ := is.(map[string]any)
	for key, value := range from {
		if lost := missing(value, to[key], at+"."+key); lost != "" {
			return lost
		}
	}
	return ""
}
