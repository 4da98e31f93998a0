package podvm

import (
	"fmt"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// Slot tells whether a mount's source is a slot: see crust.SlotsDir. If it is, path is where the sandbox has it, and the container is
// changed so that it sees what is mounted there later. An empty path is an error, because the source must never be a directory of the
// host.
func Slot(config, mount map[string]any, source, path string) (is bool, err error) {
	if _, is := crust.SlotOf(source); !is {
		return false, nil
	}
	if path == "" {
		return true, fmt.Errorf("%s is a slot, and no sandbox of this container has slots: is crustd running, and of this version?", source)
	}
	options := slices.DeleteFunc(slices.Clone(list(mount, "options")), func(o any) bool {
		name, _ := o.(string)
		return slices.Contains([]string{"bind", "shared", "slave", "private", "unbindable"}, strings.TrimPrefix(name, "r"))
	})
	mount["options"] = append(options, "rbind", "rslave") // recursive, for what the slot shows already
	// crun's default is private, which cuts the container off from the slot before it is bound.
	if linux := sub(config, "linux"); linux != nil && !receives(text(linux, "rootfsPropagation")) {
		linux["rootfsPropagation"] = "rslave"
	}
	return true, nil
}

// receives tells whether mounts reach a mount of this propagation from outside.
func receives(propagation string) bool {
	return slices.Contains([]string{"shared", "slave"}, strings.TrimPrefix(propagation, "r"))
}
