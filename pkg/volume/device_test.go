package volume

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A device node can go between two calls of the kernel, whose error has no kind then.
func TestADeviceThatIsGoneIsAState(t *testing.T) {
	err := OfDevice("v1", &fs.PathError{Op: "open", Path: "/dev/sdx", Err: fs.ErrNotExist})
	if !fault.Is(err, fault.State) || !errors.Is(err, fs.ErrNotExist) || err.Error() != "volume v1: open /dev/sdx: file does not exist" {
		t.Errorf("%v, kind %v", err, fault.KindOf(err))
	}
}
