package crust_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// A runtime mounts with the options that a driver parsed: none is lost on the way, none is added.
func FuzzOptionMap(f *testing.F) {
	for _, s := range []string{
		"noatime", "ro,noatime,nodev,commit=5", "rw,strictatime", "context=system_u:object_r:container_file_t:s0:c1,c2,noatime",
		`subvol="a=b"`, "defaults,noexec", "defaults=5", "a=b=", "discard,discard", " noatime , nodiratime ",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		o, err := mounter.ParseOptions([]string{s})
		if err != nil {
			return
		}
		list := crust.OptionList(crust.OptionMap(o.List()))
		again, err := mounter.ParseOptions(list)
		if err != nil || again.SuperblockString() != o.SuperblockString() || again.ReadOnly() != o.ReadOnly() ||
			again.ReadWrite() != o.ReadWrite() || !slices.Equal(slices.Sorted(slices.Values(o.List())), list) {
			t.Errorf("%q was parsed as %q, and arrives as %q: %v", s, o.List(), list, err)
		}
	})
}

// Whatever a driver answers, a runtime is asked for all of it, in one order.
func TestOptionsOfADriver(t *testing.T) {
	for _, options := range []map[string]string{
		{"commit": "5", "nobarrier": "", "noatime": ""}, {"x": "a="}, {"x": "="}, {"x": "=y"}, {"": "v"}, {},
	} {
		list := crust.OptionList(options)
		if again := crust.OptionMap(list); !maps.Equal(again, options) || !slices.IsSorted(list) {
			t.Errorf("%q became %q, and that %q", options, list, again)
		}
	}
	if list := crust.OptionList(nil); len(list) > 0 {
		t.Errorf("nothing became %q", list)
	}
	label := "context=u:r:t:s0:c1,c2"
	if m := crust.OptionMap([]string{label, "ro"}); m["context"] != strings.TrimPrefix(label, "context=") || len(m) != 2 {
		t.Errorf("a label became %q", m)
	}
}
