package main

import (
	"flag"
	"os"
	"regexp"
	"testing"

	"github.com/crust-csi/crust-csi/internal/scrub"
)

// A support bundle shows the flags that internal/scrub knows. A new flag must be added there, with
// the decision whether its value may be shown.
func TestB08_EveryFlagIsKnownToSupportBundles(t *testing.T) {
	(&options{}).flags().VisitAll(func(f *flag.Flag) {
		if !scrub.KnowsFlag(f.Name) {
			t.Errorf("--%s is not in internal/scrub", f.Name)
		}
	})
}

func TestEveryFlagIsInTheDocuments(t *testing.T) {
	page, err := os.ReadFile("../../docs/parameters.md")
	if err != nil {
		t.Fatal(err)
	}
	(&options{}).flags().VisitAll(func(f *flag.Flag) {
		if !regexp.MustCompile("`--?" + f.Name + "[` ]").Match(page) {
			t.Errorf("docs/parameters.md has no --%s", f.Name)
		}
	})
}
