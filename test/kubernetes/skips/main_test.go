package main

import (
	"os"
	"slices"
	"testing"
)

// A spec that is skipped for an undocumented reason is reported.
func TestASkipHasItsReason(t *testing.T) {
	page, err := os.ReadFile("../../../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	known := reasons(string(page), "Kubernetes' storage suite")
	pods := reasons(string(page), "Kubernetes' tests of pods")
	if len(pods) == 0 || slices.Contains(pods, "does not support ROX access mode") {
		t.Errorf("the reasons of another section: %q", pods)
	}
	if !slices.Contains(known, "does not support ROX access mode") || slices.Contains(known, "GroupController Service") {
		t.Errorf("the table's reasons: %q", known)
	}
	skipped := func(message string) spec {
		s := spec{State: "skipped"}
		s.Failure.Message = message
		return s
	}
	leftOut := func(texts ...string) spec {
		return spec{State: "skipped", ContainerHierarchyTexts: texts[:len(texts)-1], LeafNodeText: texts[len(texts)-1]}
	}
	sel, err := parseSelection("External Storage", []string{`\[Slow\]`}, known)
	if err != nil {
		t.Fatal(err)
	}
	counts, unknown := count([]spec{
		{State: "passed"}, {State: "failed"}, leftOut("sig-node", "[Slow] restarts"), leftOut("External Storage", "grows [Slow]"),
		leftOut("External Storage", "keeps data"),
		skipped(`Driver "csi.crust.dev" does not support ROX access mode - skipping`), skipped("it rains"), skipped("it rains"),
	}, sel, known)
	if !slices.Equal(unknown, []string{"External Storage keeps data", "it rains"}) || counts["passed"] != 1 || counts["failed"] != 1 ||
		counts["skipped: does not support ROX access mode"] != 1 || counts["left out: [Slow]"] != 1 || len(counts) != 4 {
		t.Errorf("%v, unknown: %q", counts, unknown)
	}
	if _, err := parseSelection("External Storage", []string{`\[Hard\]`}, known); err == nil {
		t.Error("a pattern that the table lacks was accepted")
	}
}
