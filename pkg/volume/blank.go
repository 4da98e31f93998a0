package volume

import (
	"context"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Prover is a Source that can prove of a device which it did not make that
// nothing on it could be lost.
type Prover interface {
	// ProveBlank proves it of an attached volume's device. It may read all of
	// it, which takes as long as that takes.
	ProveBlank(ctx context.Context, id string, p *Progress) (superblock.Result, superblock.BlankDevice, error)
}

// ProveBlank gives the proof that a volume's device may be formatted, or, in the
// Result, what is there instead. Of a volume that a pool made the pool knows it:
// nobody was given it yet.
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
	return superblock.OfPool(dev.Path)
}
