//go:build !failpoint

// Package failpoint lets a test kill the process, fail a step or make it hang, between any two
// steps. In ordinary builds a point does nothing and costs nothing. A build with the tag
// "failpoint" kills itself with SIGKILL at the point named by the environment variable
// CRUST_FAILPOINT. The file named by CRUST_FAILPOINT_FILE contains "POINT error", "POINT kill" or
// "POINT hang" while the point is active. A file of the same name with the suffix ".hit" records
// that the point was reached.
package failpoint

// Hit marks a step.
func Hit(string) {}

// Err marks a step that can also fail.
func Err(string) error { return nil }
