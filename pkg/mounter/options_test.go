package mounter

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

func TestParseOptions(t *testing.T) {
	for _, c := range []struct {
		flags      []string
		superblock string
		ro         bool
	}{
		{nil, "", false},
		{[]string{"defaults"}, "", false},
		{[]string{"noatime,nodev", "nosuid"}, "", false},
		{[]string{"ro", "commit=5"}, "commit=5", true},
		{[]string{"data=ordered,commit=5,ro"}, "commit=5,data=ordered", true},
		{[]string{"discard", "discard"}, "discard", false},
		{[]string{`context="system_u:object_r:container_file_t:s0:c1,c2"`}, "context=system_u:object_r:container_file_t:s0:c1,c2", false},
		{[]string{"context=system_u:object_r:container_file_t:s0:c1,c2,noatime,commit=9"},
			"commit=9,context=system_u:object_r:container_file_t:s0:c1,c2", false},
	} {
		o, err := ParseOptions(c.flags)
		if err != nil || o.SuperblockString() != c.superblock || o.ReadOnly() != c.ro {
			t.Errorf("%q: %q, read-only %v, %v", c.flags, o.SuperblockString(), o.ReadOnly(), err)
		}
	}
	for _, bad := range [][]string{
		{"ro", "rw"}, {"noatime,relatime"}, {"bind"}, {"remount,ro"}, {"=x"}, {"commit="}, {"commit=5,commit=6"},
		{"ro=1"}, {"nodev=x"}, {"defaults=5"}, {"defaults="}, {`context="open`}, {"source=/dev/sda"}, {"loop"}, {"a\x00b"},
	} {
		if o, err := ParseOptions(bad); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q was taken: %+v, %v", bad, o, err)
		}
	}
}

func FuzzParseOptions(f *testing.F) {
	f.Add("ro,noatime,commit=5")
	f.Add(`context="a:b:c:s0:c1,c2",discard`)
	f.Fuzz(func(t *testing.T, s string) {
		o, err := ParseOptions([]string{s})
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		for _, opt := range o.Superblock {
			if opt.Key == "" || opt.Key == "ro" || opt.Key == "rw" || opt.Key == "source" || mountAttrs[opt.Key].mask != 0 {
				t.Fatalf("%q reaches the superblock", opt)
			}
		}
		if o.With("nouuid", "").With("nouuid", "").SuperblockString() != o.With("nouuid", "").SuperblockString() {
			t.Fatal("With is not stable")
		}
	})
}

func TestLabelsAreComparedByMeaning(t *testing.T) {
	const base = "system_u:object_r:svirt_image_t:"
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"s0", "s0", true},
		{"s0:c1,c2", "s0:c2,c1", true},
		{"s0:c1.c3", "s0:c3,c2,c1", true},
		{"s0-s0:c0.c1023", "s0-s0:c0.c1023", true},
		{"s0-s0", "s0", true},
		{"s0:c1", "s0:c2", false},
		{"s0:c1,c2", "s0:c1", false},
		{"s0", "s1", false},
		{"s0:c1,bad", "s0:bad,c1", false},
	} {
		if got := SameLabel(base+c.a, base+c.b); got != c.same {
			t.Errorf("%s and %s: %v", c.a, c.b, got)
		}
	}
	if SameLabel("system_u:object_r:a_t:s0", "system_u:object_r:b_t:s0") {
		t.Error("two types are the same")
	}
}

// S04: mounts share a superblock if their options are equivalent.
func TestS04_SuperblockOptionsThatMeanTheSame(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"", "", true},
		{"data=journal", "data=journal", true},
		{"data=journal", "data=ordered", false},
		{"context=u:r:t:s0:c1,c2,c3", "context=u:r:t:s0:c1.c3", true},
		{"rootcontext=u:r:t:s0:c1,c2,c3", "rootcontext=u:r:t:s0:c3,c1.c2", true},
		{"context=u:r:t:s0:c1,c2", "context=u:r:t:s0:c1.c3", false},
		{"context=u:r:t:s0:c1,c2", "", false},
		{"context=u:r:t:s0:c1,c2", "fscontext=u:r:t:s0:c1,c2", false},
		{"context=u:r:t:s0:c1.c2,data=journal", "context=u:r:t:s0:c1,c2", false},
		{"context=u:r:t:s0:c1.c2,data=journal", "data=journal,context=u:r:t:s0:c1,c2", true},
	} {
		a, err := ParseOptions([]string{c.a})
		if err != nil {
			t.Fatal(err)
		}
		b, err := ParseOptions([]string{c.b})
		if err != nil {
			t.Fatal(err)
		}
		if a.SameSuperblock(b.SuperblockString()) != c.same || b.SameSuperblock(a.SuperblockString()) != c.same {
			t.Errorf("%q and %q: want %v", c.a, c.b, c.same)
		}
	}
	if (Options{}).SameSuperblock("\x00,,=") {
		t.Error("what cannot be read is the same as nothing")
	}
}

func TestS03_AMismatchFailsTheMount(t *testing.T) {
	o, err := ParseOptions([]string{"context=system_u:object_r:svirt_image_t:s0:c1,c2"})
	if err != nil {
		t.Fatal(err)
	}
	for shown, want := range map[string]bool{
		"system_u:object_r:svirt_image_t:s0:c2,c1": true, "system_u:object_r:unlabeled_t:s0": false, "": false,
	} {
		err := verifyLabel(o, func() (string, error) { return shown, nil })
		if (err == nil) != want {
			t.Errorf("the kernel shows %q: %v", shown, err)
		}
		if !want && (!errors.Is(err, ErrLabelMismatch) || !strings.Contains(err.Error(), "c1,c2")) {
			t.Errorf("the kernel shows %q: %v", shown, err)
		}
	}
	failed := errors.New("read failed")
	if err := verifyLabel(o, func() (string, error) { return "", failed }); !errors.Is(err, failed) {
		t.Errorf("a label that cannot be read is taken for right: %v", err)
	}
}

// What was added counts wherever the options are passed on, for example to a sandbox.
func TestAnAddedOptionIsListed(t *testing.T) {
	o, err := ParseOptions([]string{"noatime", "nouuid"})
	check(t, err)
	before := o.List()
	more := o.With("gid", "2000").With("nouuid", "")
	if got := more.List(); !slices.Equal(got, []string{"noatime", "nouuid", "gid=2000"}) {
		t.Errorf("the list is %v", got)
	}
	if !slices.Equal(o.List(), before) {
		t.Errorf("the options that it was added to have changed to %v", o.List())
	}
}
