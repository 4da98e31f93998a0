package driver

import (
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// singleWriter is ReadWriteOncePod: one publish at a time.
const singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER

// use is how a volume is used, as a VolumeCapability says.
type use struct {
	block    bool
	fstype   string // empty: whatever is there, else the default
	options  mounter.Options
	mode     csi.VolumeCapability_AccessMode_Mode
	readOnly bool // the access mode is for readers
	// hostMayMount is the class's rule for volumes that a guest had.
	hostMayMount bool
}

// parseUse reads a capability. Shares support all access modes; a volume of this node supports
// those that one node can honour.
func parseUse(c *csi.VolumeCapability, share bool) (use, error) {
	if c == nil {
		return use{}, invalid("volume_capability is missing")
	}
	u := use{mode: c.GetAccessMode().GetMode()}
	switch u.mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		singleWriter,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
		u.readOnly = true
	case csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		u.readOnly = true
		fallthrough
	case csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:
		if !share {
			return use{}, invalid(
				"access mode %s: the volume's data lies on one node, so no other node can use it; ask for ReadWriteOnce, "+
					"ReadWriteOncePod or a SINGLE_NODE mode", u.mode)
		}
	case csi.VolumeCapability_AccessMode_UNKNOWN:
		return use{}, invalid("access_mode is missing")
	default:
		return use{}, invalid("access mode %s is not known to this driver", u.mode)
	}
	switch {
	case c.GetBlock() != nil:
		u.block = true
		if share {
			return use{}, invalid("a network share cannot be used as a block device")
		}
	case c.GetMount() != nil:
		m := c.GetMount()
		u.fstype = m.GetFsType()
		if strings.ContainsAny(u.fstype, "/,= \x00") || len(u.fstype) > 64 {
			return use{}, invalid("fs_type %q is no name of a file system", u.fstype)
		}
		if g := m.GetVolumeMountGroup(); g != "" {
			if _, err := ownership.ParseGroup(g); err != nil {
				return use{}, err
			}
		}
		var err error
		if u.options, err = mounter.ParseOptions(m.GetMountFlags()); err != nil {
			return use{}, err
		}
		name := u.fstype
		if share {
			name = fstype.NFS
		}
		if err := checkOptions(name, u.options); err != nil {
			return use{}, err
		}
		if u.readOnly && u.options.ReadWrite() {
			return use{}, invalid("mount option \"rw\" contradicts the access mode %s", u.mode)
		}
	default:
		return use{}, invalid("volume_capability has neither mount nor block")
	}
	return u, nil
}

// checkOptions refuses options, and says where those of this driver are described.
func checkOptions(name string, o mounter.Options) error {
	if err := mounter.CheckOptions(name, o); err != nil {
		return fmt.Errorf("%w (docs/parameters.md, \"Mount options\")", err)
	}
	return nil
}

// parseUses reads capabilities that a volume must support all at once.
func parseUses(list []*csi.VolumeCapability, share bool) (use, error) {
	if len(list) == 0 {
		return use{}, invalid("volume_capabilities are missing")
	}
	var first use
	for i, c := range list {
		u, err := parseUse(c, share)
		if err != nil {
			return use{}, err
		}
		if i == 0 {
			first = u
			continue
		}
		if u.block != first.block {
			return use{}, invalid("a volume cannot be asked for both as block device and with a file system")
		}
		if first.fstype == "" {
			first.fstype = u.fstype
		}
		if u.fstype != "" && u.fstype != first.fstype {
			return use{}, invalid("a volume cannot have two file systems, %q and %q", first.fstype, u.fstype)
		}
	}
	return first, nil
}

// creatable returns the file system to format a new volume with.
func (u use) creatable() (string, error) {
	if u.block {
		return "", nil
	}
	name := u.fstype
	if name == "" {
		name = fstype.Default()
	}
	if len(fstype.Of(name).Make) == 0 {
		return "", fault.New(fault.Invalid, "file system %q cannot be made by this driver; choose one of %s", name,
			strings.Join(fstype.Formats(), ", "))
	}
	return name, nil
}
