// Package version is the version of this build.
package version

import (
	_ "embed"
	"strings"
)

// release is the version of the release that this is, or that comes next. It is
// said here and nowhere else.
//
//go:embed VERSION
var release string

// number is set by the build of a release: -ldflags "-X .../internal/version.number=1.2.3".
var number string

// String gives it: a build that is no release has "-dev" behind it.
func String() string {
	if number != "" {
		return number
	}
	return strings.TrimSpace(release) + "-dev"
}
