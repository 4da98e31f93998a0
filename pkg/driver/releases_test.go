package driver

import (
	"testing"

	"github.com/crust-csi/crust-csi/internal/recordtest"
)

func TestRecordsOfReleasesAreRead(t *testing.T) {
	recordtest.Read[publishedRecord](t, publishedType)
	recordtest.Read[deferral](t, deferralType)
	recordtest.Read[stagedRecord](t, stagedType)
}
