package driver

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

const defaultSize = 1 << 30 // bytes

// checkRange refuses a range that makes no sense.
func checkRange(r *csi.CapacityRange) error {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return invalid("capacity_range: negative sizes (%d, %d)", required, limit)
	case limit > 0 && required > limit:
		return invalid("capacity_range: required_bytes %d is larger than limit_bytes %d", required, limit)
	}
	return nil
}

// chooseSize returns a size, in bytes, that the pool can make.
func chooseSize(r *csi.CapacityRange, can volume.Sizes, source, minimum int64) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	if err := checkRange(r); err != nil {
		return 0, err
	}
	if required > can.Most {
		return 0, fault.New(fault.OutOfRange, "required_bytes %d is more than the %d that a volume can have", required, can.Most)
	}
	want := max(required, source, minimum)
	if required == 0 && source == 0 {
		want = max(want, min(defaultSize, can.Most/can.Fine*can.Fine))
		if limit > 0 {
			want = max(min(want, limit/can.Fine*can.Fine), minimum, can.Fine)
		}
	}
	size := roundUp(want, can.Step)
	if limit > 0 && size > limit || size > can.Most || want == source { // a copy need not be larger: there are file systems that never grow
		size = roundUp(want, can.Fine)
	}
	if size > can.Most {
		return 0, fault.New(fault.OutOfRange, "the volume needs %d bytes (its origin has %d, its file system needs %d, sizes are multiples of %d), "+
			"and a volume can have %d", size, source, minimum, can.Fine, can.Most)
	}
	if limit > 0 && size > limit {
		return 0, fault.New(fault.OutOfRange,
			"limit_bytes %d: the volume needs at least %d bytes (its origin has %d, its file system needs "+
				"%d, sizes are multiples of %d)", limit, size, source, minimum, can.Fine)
	}
	return size, nil
}

func roundUp(size, step int64) int64 { return (size + step - 1) / step * step }
