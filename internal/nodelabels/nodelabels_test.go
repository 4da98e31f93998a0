package nodelabels

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLabelsAreReadStrictly(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"a=\"b\"\n": {"a": "b"},
		"a=\"\"":    {"a": ""},
		"kubernetes.io/hostname=\"n1\"\n\nzone=\"b-1\"\n": {"kubernetes.io/hostname": "n1", "zone": "b-1"},
	} {
		if got, err := Parse([]byte(text)); err != nil || !maps.Equal(got, want) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for text, word := range map[string]string{
		"":                    "no labels",
		"\n\n":                "no labels",
		"a":                   `write key="value"`,
		"a=b":                 `write key="value"`,
		"a=`b`":               `write key="value"`,
		"a='b'":               `write key="value"`,
		"a=\"b":               `write key="value"`,
		"a=\"b\"\r\n":         `write key="value"`,
		"ok=\"1\"\na=\"b c\"": "line 2: the value",
		"=\"b\"":              "key",
		"a b=\"c\"":           "key",
		"a=\"b\"\na=\"b\"\n":  "line 2: the label a is there twice",
		"a=\"b\"\n" + strings.Repeat("\n", 1<<20): "larger",
	} {
		if got, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%.40q: %v, %v; want %s", text, got, err, word)
		}
	}
}

func TestLabelsThatAreWrittenAreRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "labels")
	for _, labels := range []map[string]string{{"b": "1", "a.example/x": ""}, {"c": "2"}} {
		if err := Write(path, labels); err != nil {
			t.Fatal(err)
		}
		if got, err := Read(path); err != nil || !maps.Equal(got, labels) {
			t.Errorf("%v became %v, %v", labels, got, err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o644 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if err := Write(path, nil); err == nil {
		t.Error("no labels were written")
	}
	if err := Write(path, map[string]string{"a": "b\nc=\"d\""}); err == nil {
		t.Error("a value with a line in it was written")
	}
	if got, err := Read(path); err != nil || got["c"] != "2" {
		t.Errorf("what was refused has changed the file: %v, %v", got, err)
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := Read(filepath.Join(t.TempDir(), "none")); err == nil || !strings.Contains(err.Error(), "none") {
		t.Errorf("no file: %v", err)
	}
}

// FuzzParse: parsed labels are exactly those in the text.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"a=\"b\"\n", "a=\"b\"\na=\"c\"", "a.example/b=\"\\x41\"\n", "a=\"b\"\r\n", "=\"\"", "a=\"\n\""} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		labels, err := Parse(b)
		if err != nil {
			return
		}
		text := Format(labels)
		again, err := Parse(text)
		if err != nil || !maps.Equal(again, labels) || len(labels) == 0 || bytes.Count(text, []byte("\n")) != len(labels) {
			t.Errorf("%q is %v, and %q %v (%v)", b, labels, text, again, err)
		}
	})
}
