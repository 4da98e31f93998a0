package looppool

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
)

func TestRecordsOfReleasesAreRead(t *testing.T) {
	recordtest.Read[volumeRecord](t, volumeType)
	recordtest.Read[snapshotRecord](t, snapshotType)
}
