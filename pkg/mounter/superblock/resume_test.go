package superblock

import (
	"encoding/json"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// An intent of nothing, as a record without one decodes to, gives no proof. The path is not even
// looked at.
func TestA02_NoFormatOnRecordGivesNoProof(t *testing.T) {
	for _, text := range []string{`{}`, `null`, `{"type": "ext4"}`, `{"sizeBytes": 1073741824}`} {
		var i Intent
		if err := json.Unmarshal([]byte(text), &i); err != nil {
			t.Fatal(err)
		}
		if _, blank, err := Resume("/dev/null", i); !fault.Is(err, fault.State) || blank.Path() != "" {
			t.Errorf("%s: %+v, %v", text, blank, err)
		}
	}
}
