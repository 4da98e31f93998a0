// Package version is the version of this build.
package version

// number is set by the build: -ldflags "-X .../internal/version.number=1.2.3".
var number = "0.1.0-dev"

// String gives it.
func String() string { return number }
