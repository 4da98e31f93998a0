package crust

import (
	"path/filepath"
	"regexp"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// SlotsDir is the directory of slots, as a path of the host. It does not have to exist. A container with a mount of SlotsDir/NAME starts
// without a volume. BindVolume later shows one in the mount's directory SlotVolume. A runtime that starts a sandbox before it knows the
// sandbox's pod uses this.
const SlotsDir = "/run/crust/slots"

// SlotVolume is the directory of a slot that shows the volume. It is empty until then. The slot itself is never mounted over, so a
// container that starts later sees the same.
const SlotVolume = "volume"

var slotName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// CheckSlot tells whether a name can be a slot's: a label of RFC 1123. Otherwise it is a fault Invalid.
func CheckSlot(name string) error {
	if !slotName.MatchString(name) {
		return fault.New(fault.Invalid, "slot %q: give 1 to 63 lowercase letters, digits and dashes, and no dash at its ends", name)
	}
	return nil
}

// SlotOf returns the slot that a mount's source names, and whether it names one. A source further down in SlotsDir has a name
// that CheckSlot refuses.
func SlotOf(source string) (name string, is bool) {
	name, err := filepath.Rel(SlotsDir, filepath.Clean(source))
	return name, err == nil && name != "." && filepath.IsLocal(name)
}
