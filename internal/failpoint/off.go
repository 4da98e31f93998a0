//go:build !failpoint

// Package failpoint lets a test kill the process, fail a step or have it hang,
// between any two steps. In ordinary builds a point does nothing and costs
// nothing. A build with the tag "failpoint" ends itself with SIGKILL at the
// point that the environment variable CRUST_FAILPOINT names. The file that
// CRUST_FAILPOINT_FILE names says "POINT error", "POINT kill" or "POINT hang" for
// as long as the point is to do that. A file with ".hit" behind its name says that
// the point did.
package failpoint

// Hit marks a step.
func Hit(string) {}

// Err marks a step that can also fail.
func Err(string) error { return nil }
