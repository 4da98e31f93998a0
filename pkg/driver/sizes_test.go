package driver

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// extents is a pool whose sizes are multiples of 4 MiB, as in a volume group.
type extents struct {
	volume.Pool
	most   int64
	asked  int64
	volume volume.Volume
}

func (*extents) Name() string { return "p" }
func (p *extents) Sizes() volume.Sizes {
	return volume.Sizes{Step: 4 << 20, Fine: 4 << 20, Most: p.most}
}
func (p *extents) Get(string) (volume.Volume, error) { return p.volume, nil }
func (*extents) Capacity() (volume.Capacity, error)  { return volume.Capacity{Left: 1 << 30}, nil }
func (p *extents) Expand(_ context.Context, _ string, size int64) (volume.Volume, error) {
	p.asked = size
	return volume.Volume{}, fault.New(fault.Unavailable, "no")
}

// The pool decides which sizes a new volume and a growing one can have.
func TestSizesAreThoseOfThePool(t *testing.T) {
	const mib = 1 << 20
	p := &extents{most: 1 << 40}
	r, err := volume.NewRegistry(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d := &Driver{Config: Config{Log: log, Volumes: r}, readers: newReaders(log)}
	want := func(required, limit int64) (int64, error) {
		spec, _, err := d.wanted(t.Context(), &csi.CreateVolumeRequest{
			Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit},
			VolumeCapabilities: []*csi.VolumeCapability{{
				AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
				AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			}},
		})
		return spec.Size, err
	}
	for _, c := range []struct {
		required, limit, size int64
		kind                  fault.Kind
	}{
		{required: 1, size: 4 * mib},
		{required: 4 * mib, size: 4 * mib},
		{required: 4*mib + 1, size: 8 * mib},
		{limit: 7 * mib, size: 4 * mib},
		{required: 5 * mib, limit: 7 * mib, kind: fault.OutOfRange},
		{required: 1<<40 + 1, kind: fault.OutOfRange},
	} {
		size, err := want(c.required, c.limit)
		if c.kind != fault.Internal && !fault.Is(err, c.kind) || c.kind == fault.Internal && (err != nil || size != c.size) {
			t.Errorf("%+v: %d, %v", c, size, err)
		}
	}
	_, _ = d.enlarge(t.Context(), p, volume.Volume{ID: "p.v", Size: 4 * mib, Block: true}, &csi.CapacityRange{RequiredBytes: 4*mib + 1})
	if p.asked != 8*mib {
		t.Errorf("it was grown to %d bytes", p.asked)
	}
	c, err := d.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	if err != nil || c.GetMinimumVolumeSize().GetValue() != 4*mib {
		t.Errorf("%v, %v", c, err)
	}

	// A pool with small volumes: no size that is chosen, and none that is announced, is too large.
	p.most = 10 * mib
	if size, err := want(9*mib, 0); !fault.Is(err, fault.OutOfRange) {
		t.Errorf("9 MiB of at most 10 in steps of 4: %d, %v", size, err)
	}
	if size, err := want(0, 0); err != nil || size != 8*mib {
		t.Errorf("no size was asked for: %d, %v", size, err)
	}
	c, err = d.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	if err != nil || c.GetMaximumVolumeSize().GetValue() != 8*mib {
		t.Errorf("%v, %v", c, err)
	}
}

// A copy of a size that is no multiple of a pool's step, which only a limit makes, has that size: a file system that never grows could not
// use more.
func TestD09_ACopyMayHaveTheSizeOfItsOrigin(t *testing.T) {
	const mib = 1 << 20
	can := volume.Sizes{Step: 4 * mib, Fine: 4096, Most: 1 << 40}
	const origin = 5*mib + 4096
	for _, r := range []*csi.CapacityRange{
		nil, {RequiredBytes: origin}, {RequiredBytes: origin, LimitBytes: 9 * mib}, {LimitBytes: origin},
	} {
		if size, err := chooseSize(r, can, origin, 0); err != nil || size != origin {
			t.Errorf("%v: %d, %v", r, size, err)
		}
	}
	if size, err := chooseSize(&csi.CapacityRange{RequiredBytes: origin + 1}, can, origin, 0); err != nil || size != 8*mib {
		t.Errorf("%d, %v", size, err)
	}
}

// A request to grow that makes no sense is refused, also if the volume is as large already.
func TestD09_AnImpossibleRangeIsRefused(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	p := &extents{most: 1 << 40}
	d := &Driver{Config: Config{Log: log}, readers: newReaders(log)}
	for _, r := range []*csi.CapacityRange{{LimitBytes: -1}, {RequiredBytes: -1}, {RequiredBytes: 2 << 20, LimitBytes: 1 << 20}} {
		if _, err := d.enlarge(t.Context(), p, volume.Volume{ID: "p.v", Size: 4 << 20}, r); !fault.Is(err, fault.Invalid) || p.asked != 0 {
			t.Errorf("%v: %v", r, err)
		}
	}
}

// A file system that never grows is not given a larger device: nobody could use that.
func TestD09_WhatNeverGrowsKeepsItsSize(t *testing.T) {
	const mib = 1 << 20
	p := &extents{most: 1 << 40}
	r, err := volume.NewRegistry(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d := &Driver{Config: Config{Log: log, Volumes: r}, readers: newReaders(log)}
	v := volume.Volume{ID: volume.VolumeID("p", "v"), Size: 8 * mib, FSType: fstype.VFAT}
	_, err = d.enlarge(t.Context(), p, v, &csi.CapacityRange{RequiredBytes: 9 * mib})
	if !fault.Is(err, fault.OutOfRange) || p.asked != 0 || !strings.Contains(err.Error(), "copy the data") {
		t.Errorf("it was grown to %d bytes: %v", p.asked, err)
	}
	// A kubelet that is about to mount the volume goes on only after this code.
	p.volume, d.NodesExpand = v, true
	err = d.enlargeHere(t.Context(), p, v.ID, &csi.CapacityRange{RequiredBytes: 9 * mib})
	if !fault.Is(err, fault.State) || p.asked != 0 || !strings.Contains(err.Error(), "copy the data") {
		t.Errorf("on the node it was grown to %d bytes: %v", p.asked, err)
	}
	if _, _ = d.enlarge(t.Context(), p, v, &csi.CapacityRange{RequiredBytes: 8 * mib}); p.asked != 8*mib {
		t.Errorf("the size that it has: %d bytes", p.asked)
	}
}
