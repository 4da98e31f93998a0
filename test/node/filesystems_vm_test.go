//go:build vm

package node

import "github.com/crust-csi/crust-csi/pkg/mounter/fstype"

// filesystems are all that can be made: the guests' kernels have them.
var filesystems = fstype.Formats()
