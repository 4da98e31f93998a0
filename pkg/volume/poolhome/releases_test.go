package poolhome

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
)

func TestRecordsOfReleasesAreRead(t *testing.T) {
	recordtest.Read[identity](t, identityType)
	recordtest.Read[known](t, knownType)
}
