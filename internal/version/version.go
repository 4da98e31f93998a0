// Package version is the version of this build.
package version

import (
	_ "embed"
	"strings"
)

// release is the version of the release that these sources are, or else of the next one. Only the Helm
// chart has another copy.
//
//go:embed VERSION
var release string

// number is set by the build of a release: -ldflags "-X .../internal/version.number=1.2.3".
var number string

// String returns the version: a build that is not a release has the suffix "-dev".
func String() string {
	if number != "" {
		return number
	}
	return strings.TrimSpace(release) + "-dev"
}
