package looppool

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

func TestRecordsOfReleasesAreRead(t *testing.T) {
	recordtest.Read[journal.VolumeRecord](t, journal.VolumeType(kind))
	recordtest.Read[journal.SnapshotRecord](t, journal.SnapshotType(kind))
}
