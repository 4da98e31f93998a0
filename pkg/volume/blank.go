package volume

import (
	"context"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Prover is a Source that can prove, for a device that it did not make, that nothing on it
// could be lost.
type Prover interface {
	// ProveBlank proves it for the device of an attached volume. It may read the whole device,
	// which can take long.
	ProveBlank(ctx context.Context, id string, p *Progress) (superblock.Result, superblock.BlankDevice, error)
}

// ProveBlank returns the proof that a volume's device may be formatted or, in the Result, what
// is there instead. A Pool made the device and its Facts say whether anybody has received it, so a
// probe is enough. A Prover proves it itself. The device of any other Source is read as a whole,
// which may take hours.
func ProveBlank(
	ctx context.Context, src Source, id string, dev mounter.Device, p *Progress,
) (superblock.Result, superblock.BlankDevice, error) {
	if s, ok := src.(Prover); ok {
		return s.ProveBlank(ctx, id, p)
	}
	v, err := src.Get(id)
	if err == nil && (v.Facts.GivenRaw || v.Facts.Formatted != "") {
		err = fault.New(fault.State, "volume %s was given to its users before, so it is not formatted", id)
	}
	if err != nil {
		return superblock.Result{}, superblock.BlankDevice{}, err
	}
	if _, ok := src.(Pool); !ok {
		return superblock.ProveBlank(ctx, dev.Path, superblock.Reading{})
	}
	return superblock.OfPool(dev.Path)
}
