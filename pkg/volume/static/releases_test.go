package static

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
)

func TestRecordsOfReleasesAreRead(t *testing.T) {
	recordtest.Read[entry](t, entryType)
	recordtest.Read[deviceRecord](t, deviceType)
	recordtest.Read[readRecord](t, readType)
}
