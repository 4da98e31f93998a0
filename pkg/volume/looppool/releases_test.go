package looppool

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

type (
	volumeRecord   = journal.VolumeRecord
	snapshotRecord = journal.SnapshotRecord
)

func TestRecordsOfReleasesAreRead(t *testing.T) {
	recordtest.Read[volumeRecord](t, volumeType)
	recordtest.Read[snapshotRecord](t, snapshotType)
}
