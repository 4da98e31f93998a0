package main

import (
	"os"
	"slices"
	"testing"
)

// A spec that is skipped for an undocumented reason is reported.
func TestASkipHasItsReason(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	known := reasons(string(page))
	if !slices.Contains(known, "does not support ROX access mode") || slices.Contains(known, "GroupController Service") {
		t.Errorf("the table's reasons: %q", known)
	}
	skipped := func(message string) spec {
		s := spec{State: "skipped"}
		s.Failure.Message = message
		return s
	}
	counts, unknown := count([]spec{
		{State: "passed"}, {State: "failed"}, {State: "skipped"},
		skipped(`Driver "csi.crust.dev" does not support ROX access mode - skipping`), skipped("it rains"), skipped("it rains"),
	}, known)
	if !slices.Equal(unknown, []string{"it rains"}) || counts["passed"] != 1 || counts["failed"] != 1 ||
		counts["skipped: does not support ROX access mode"] != 1 || len(counts) != 3 {
		t.Errorf("%v, unknown: %q", counts, unknown)
	}
}
