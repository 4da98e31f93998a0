package main

import (
	"flag"
	"testing"

	"github.com/crust-csi/crust-csi/internal/scrub"
)

// A support bundle shows the flags that internal/scrub knows. Whoever adds a flag
// decides there whether its value may be shown.
func TestB08_EveryFlagIsKnownToSupportBundles(t *testing.T) {
	(&options{}).flags().VisitAll(func(f *flag.Flag) {
		if !scrub.KnowsFlag(f.Name) {
			t.Errorf("--%s is not in internal/scrub", f.Name)
		}
	})
}
