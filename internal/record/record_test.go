package record

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

type thing struct {
	A string `json:"a"`
	N int64  `json:"n,omitempty"`
}

var things = Type{Kind: "test.thing", Version: 2}

func TestWriteAndRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x"+Extension)
	for _, v := range []thing{{"one", 1}, {"two", 0}} {
		if err := things.Write(path, v); err != nil {
			t.Fatal(err)
		}
		var got thing
		if err := things.Read(path, &got); err != nil || got != v {
			t.Fatalf("%+v became %+v: %v", v, got, err)
		}
	}
	names, err := Names(filepath.Dir(path))
	if err != nil || len(names) != 1 || names[0] != "x" {
		t.Errorf("names: %v %v", names, err)
	}
	if err := Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := Remove(path); err != nil {
		t.Errorf("a second removal: %v", err)
	}
	var got thing
	if err := things.Read(path, &got); !os.IsNotExist(err) {
		t.Errorf("read after removal: %v", err)
	}
}

func TestWhatIsNotUnderstoodIsRefused(t *testing.T) {
	good, err := things.Encode(thing{"x", 1})
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]string{
		"newer version": strings.Replace(string(good), `"version": 2`, `"version": 3`, 1),
		"version 0":     strings.Replace(string(good), `"version": 2`, `"version": 0`, 1),
		"other kind":    strings.Replace(string(good), "test.thing", "test.other", 1),
		"unknown field": strings.Replace(string(good), `"n"`, `"m"`, 1),
		"torn":          string(good[:len(good)/2]),
		"empty":         "",
		"more":          string(good) + "{}",
	} {
		var v thing
		err := things.Decode([]byte(b), &v)
		if err == nil {
			t.Errorf("%s was read", name)
		}
		if name == "newer version" && !fault.Is(err, fault.State) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	good, err := things.Encode(thing{"x", 1})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, b []byte) {
		var v thing
		if things.Decode(b, &v) != nil {
			return
		}
		again, err := things.Encode(v)
		if err != nil {
			t.Fatal(err)
		}
		var w thing
		if err := things.Decode(again, &w); err != nil || v != w {
			t.Fatalf("%+v became %+v: %v", v, w, err)
		}
	})
}
