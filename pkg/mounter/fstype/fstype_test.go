package fstype

import (
	"slices"
	"strings"
	"testing"
)

// Some arm64 kernels have pages of 64 KiB. Other kernels must be able to mount what those
// format.
func TestABtrfsHasTheSameSectorsOnEveryKernel(t *testing.T) {
	if args := strings.Join(Of(Btrfs).Make, " "); !strings.Contains(args, "-s 4096") {
		t.Error(args)
	}
}

// neverGrow are the file systems that can be made and never grow.
var neverGrow = []string{F2FS}

// Rows are complete: what can be made can be checked, detected and, but for neverGrow, grown, in use or by a program, and has a command
// for people.
func TestRowsAreWhole(t *testing.T) {
	seen := map[string]bool{}
	for _, row := range All() {
		if seen[row.Name] {
			t.Errorf("%s has two rows", row.Name)
		}
		seen[row.Name] = true
		if row.Like != "" && len(Of(row.Like).Options) == 0 {
			t.Errorf("%s is like %s, which has no options", row.Name, row.Like)
		}
		if len(row.Make) > 0 && (row.Force == "" || row.Minimum == 0 || row.Head == 0 || row.IdmapSince == "") {
			t.Errorf("%s can be made, and its row lacks something: %+v", row.Name, row)
		}
		if len(row.Make) > 0 && row.Grows() == slices.Contains(neverGrow, row.Name) {
			t.Errorf("%s: its row tells that it grows: %v", row.Name, row.Grows())
		}
		full := len(row.Check) > 0 && (len(row.Fully) > 0 || row.CopyMetadata == nil) // one that preens trusts the mark of a clean unmount
		if row.GrowthIsPrivileged && len(row.Resize) == 0 || len(row.Resize) > 0 && !full {
			t.Errorf("%s: growth without the privilege needs a program, and that a full check", row.Name)
		}
		if row.Replayed && len(row.Resize) == 0 {
			t.Errorf("%s: nothing is grown after its log was replayed", row.Name)
		}
		if row.Grow != nil && !row.GrowthIsPrivileged && len(row.Resize) > 0 {
			t.Errorf("%s: no process ever runs %s", row.Name, row.Resize)
		}
		for _, argv := range [][]string{row.Make, row.Check, row.Look, row.NewID, row.Resize} {
			if len(argv) > 0 && PackageOf(argv[0]) == "" {
				t.Errorf("%s: the package of %s is not known", row.Name, argv[0])
			}
		}
		if len(row.Check) > 0 && (len(row.Look) == 0 || (row.CopyMetadata != nil) == slices.Equal(row.Check, row.Look)) {
			t.Errorf("%s: the check that changes nothing is %q", row.Name, row.Look)
		}
	}
	if Default() != Ext4 || Of("nothing").Name != "nothing" || Kernel("ntfs") != NTFS || Kernel(XFS) != XFS {
		t.Error("defaults")
	}
}
