package record

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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

// What could not be read again is not written, and the record stays as it was.
func TestARecordThatIsTooLarge(t *testing.T) {
	kind, path := Type{Kind: "large", Version: 1}, filepath.Join(t.TempDir(), "r"+Extension)
	long, indented := strings.Repeat("<", maxSize/6), make([]int, maxSize/4) // the latter is large when it is indented
	for _, c := range []struct {
		write func(string, any) error
		large []any
	}{{kind.Write, []any{long, indented}}, {kind.WriteVolatile, []any{long}}} {
		write := c.write
		if err := write(path, "small"); err != nil {
			t.Fatal(err)
		}
		for _, large := range c.large {
			if err := write(path, large); err == nil {
				t.Error("a large one is written")
			}
		}
		var got string
		if err := kind.Read(path, &got); err != nil || got != "small" {
			t.Errorf("%q, %v", got, err)
		}
		// What is read can be written again.
		almost := strings.Repeat("x", maxSize-200)
		if err := errors.Join(write(path, almost), kind.Read(path, &got), write(path, got)); err != nil || got != almost {
			t.Error(err)
		}
	}
	volatile := filepath.Join(t.TempDir(), "v"+Extension)
	if err := errors.Join(kind.WriteVolatile(volatile, indented), kind.WriteVolatile(volatile, indented)); err != nil {
		t.Errorf("a volatile one that was written is too large to be replaced: %v", err)
	}
}

// A process that is killed while it writes leaves nothing that the next one does not remove.
func TestD06_WhatACrashLeftOfAWrite(t *testing.T) {
	dir := t.TempDir()
	kind := Type{Kind: "thing", Version: 1}
	if err := kind.Write(filepath.Join(dir, "whole"+Extension), "x"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"whole.json.tmp", "other.json.tmp", "foreign.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	names, err := Load(dir)
	if err != nil || !slices.Equal(names, []string{"whole"}) {
		t.Fatalf("%q, %v", names, err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 || left[0].Name() != "foreign.tmp" || left[1].Name() != "whole.json" {
		t.Errorf("%v, %v", left, err)
	}
}

// A process that lacks descriptors cannot judge records, so none is handed out as unusable.
func TestA10_AShortageIsNotAboutARecord(t *testing.T) {
	d := Dir[string]{Path: t.TempDir(), Type: Type{"test.dir", 1}, Name: func(s string) string { return Name(s) }}
	for _, s := range []string{"a", "b"} {
		if err := d.Type.Write(d.File(Name(s)), s); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(d.File(Name("b")), d.File(Name("c"))); err != nil {
		t.Fatal(err)
	}
	seen := map[string]error{}
	visit := func(_, s string, err error) error { seen[s] = err; return nil }
	if err := d.Load(visit); err != nil || len(seen) != 2 || seen["a"] != nil || !errors.Is(seen["b"], ErrMisplaced) {
		t.Errorf("%v, %v", seen, err)
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	asked := 0
	err := d.Load(func(string, string, error) error {
		asked++
		return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1, Max: limit.Max})
	})
	if e := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); e != nil {
		t.Fatal(e)
	}
	if !Untold(err) || asked != 1 {
		t.Errorf("without descriptors: %d records, %v", asked, err)
	}
}
