//go:build !failpoint

// Package failpoint lets a test kill the process between any two steps. In
// ordinary builds a point does nothing and costs nothing; a build with the tag
// "failpoint" ends itself with SIGKILL at the point that the environment
// variable CRUST_FAILPOINT names.
package failpoint

// Hit marks a step.
func Hit(string) {}
