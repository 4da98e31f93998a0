package engine

import (
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// To crust-agent, NotFound means that the sandbox has ended.
func TestADeviceThatIsGoneIsAState(t *testing.T) {
	gone := mounter.Device{Path: filepath.Join(t.TempDir(), "nope")}
	if m, err := Open(t.Context(), Request{Device: gone, Type: "ext4"}); m != nil || !fault.Is(err, fault.State) {
		t.Errorf("%v, %v, kind %v", m, err, fault.KindOf(err))
	}
}
