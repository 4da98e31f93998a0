package poolhome

import (
	"context"
	"errors"

	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Name is the pool's name.
func (p *Pool) Name() string { return p.o.Name }

// Sizes are those of the pool. Before it was there once nothing is made in it, and any do.
func (p *Pool) Sizes() volume.Sizes {
	if in := p.known(); in != nil {
		return in.Sizes()
	}
	return volume.FileSizes()
}

// Usable is that of the pool, if it is there.
func (p *Pool) Usable() error {
	in, err := p.here()
	if err != nil {
		return err
	}
	return in.Usable()
}

// Recover is done now or when the pool comes. A pool that cannot be recovered is opened and recovered anew by the next
// call, and its trouble is not the driver's.
func (p *Pool) Recover(thaw volume.Thaw) error {
	p.recovery.Lock()
	p.thaw = thaw
	p.recovery.Unlock()
	if !p.looked.Load() {
		return nil // it is recovered when it is opened, or by the call after that
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inner != nil {
		p.recover()
	}
	return nil
}

// recover recovers a pool that was opened before it was known how. The caller holds mu.
func (p *Pool) recover() {
	p.recovery.Lock()
	defer p.recovery.Unlock()
	if p.recovered || p.thaw == nil {
		return
	}
	if err := p.inner.Recover(p.thaw); err != nil {
		p.said = true
		p.o.Log.Error("a pool is away", "error", p.unusable(errors.Join(err, p.inner.Close())))
		p.inner = nil
		p.once.Store(nil)
		return
	}
	p.recovered = true
}

// Close closes the pool.
func (p *Pool) Close() error {
	if in := p.known(); in != nil {
		return in.Close()
	}
	return nil
}

// Owns gives the volume that a device in use belongs to.
func (p *Pool) Owns(d mounter.Device) (string, bool, error) {
	in, err := p.here()
	if err != nil {
		return "", false, err
	}
	return in.Owns(d)
}

// List gives the volumes that are known.
func (p *Pool) List() []volume.Volume {
	if in := p.known(); in != nil {
		return in.List()
	}
	return nil
}

// ListSnapshots gives the snapshots that are known.
func (p *Pool) ListSnapshots() []volume.Snapshot {
	if in := p.known(); in != nil {
		return in.ListSnapshots()
	}
	return nil
}

// Health tells what is wrong with where the volume's data lies.
func (p *Pool) Health(id string) []mounter.Ailment {
	in, err := p.here()
	if err != nil {
		return []mounter.Ailment{{Reason: "PoolIsAway", Message: err.Error(), Fatal: true}}
	}
	return in.Health(id)
}

// with calls f with the pool, if it is there.
func with[T any](p *Pool, f func(volume.Pool) (T, error)) (T, error) {
	in, err := p.here()
	if err != nil {
		var none T
		return none, err
	}
	return f(in)
}

func (p *Pool) do(f func(volume.Pool) error) error {
	in, err := p.here()
	if err != nil {
		return err
	}
	return f(in)
}

// The others are those of the pool, if it is there.

// Get gives a volume.
func (p *Pool) Get(id string) (volume.Volume, error) {
	return with(p, func(in volume.Pool) (volume.Volume, error) { return in.Get(id) })
}

// Allocated is what a volume takes of the pool.
func (p *Pool) Allocated(id string) (int64, error) {
	return with(p, func(in volume.Pool) (int64, error) { return in.Allocated(id) })
}

// Capacity of the pool.
func (p *Pool) Capacity() (volume.Capacity, error) { return with(p, volume.Pool.Capacity) }

// Check tells what in the pool does not fit together.
func (p *Pool) Check() ([]volume.Finding, error) { return with(p, volume.Pool.Check) }

// Attached gives what Attach made.
func (p *Pool) Attached(id string) (a volume.Attachment, ok bool, err error) {
	in, err := p.here()
	if err != nil {
		return a, false, err
	}
	return in.Attached(id)
}

// Attach makes the volume's device.
func (p *Pool) Attach(ctx context.Context, id string) (volume.Attachment, error) {
	return with(p, func(in volume.Pool) (volume.Attachment, error) { return in.Attach(ctx, id) })
}

// AttachReadOnly makes a device of the volume that takes no writes.
func (p *Pool) AttachReadOnly(ctx context.Context, id string) (mounter.Device, error) {
	return with(p, func(in volume.Pool) (mounter.Device, error) { return in.AttachReadOnly(ctx, id) })
}

// DetachReadOnly releases the devices of AttachReadOnly.
func (p *Pool) DetachReadOnly(ctx context.Context, id string, inUse []mounter.Device) error {
	return p.do(func(in volume.Pool) error { return in.DetachReadOnly(ctx, id, inUse) })
}

// Detach releases the volume's devices.
func (p *Pool) Detach(ctx context.Context, id string) error {
	return p.do(func(in volume.Pool) error { return in.Detach(ctx, id) })
}

// ForPod gives the device whose node a pod may have.
func (p *Pool) ForPod(ctx context.Context, id string, d mounter.Device) (mounter.Device, error) {
	return with(p, func(in volume.Pool) (mounter.Device, error) { return in.ForPod(ctx, id, d) })
}

// Mend sets back what pods changed of their devices.
func (p *Pool) Mend(ctx context.Context, id string) error {
	return p.do(func(in volume.Pool) error { return in.Mend(ctx, id) })
}

// Refresh makes an attached device as large as its volume.
func (p *Pool) Refresh(ctx context.Context, id string) error {
	return p.do(func(in volume.Pool) error { return in.Refresh(ctx, id) })
}

// SetFacts keeps the facts with the volume.
func (p *Pool) SetFacts(id string, facts volume.Facts) error {
	return p.do(func(in volume.Pool) error { return in.SetFacts(id, facts) })
}

// Create makes a volume.
func (p *Pool) Create(ctx context.Context, spec volume.Spec, progress *volume.Progress) (volume.Volume, error) {
	return with(p, func(in volume.Pool) (volume.Volume, error) { return in.Create(ctx, spec, progress) })
}

// Delete destroys a volume.
func (p *Pool) Delete(ctx context.Context, id string) error {
	return p.do(func(in volume.Pool) error { return in.Delete(ctx, id) })
}

// Expand makes a volume larger.
func (p *Pool) Expand(ctx context.Context, id string, size int64) (volume.Volume, error) {
	return with(p, func(in volume.Pool) (volume.Volume, error) { return in.Expand(ctx, id, size) })
}

// CreateSnapshot takes a snapshot.
func (p *Pool) CreateSnapshot(ctx context.Context, spec volume.SnapshotSpec, progress *volume.Progress) (volume.Snapshot, error) {
	return with(p, func(in volume.Pool) (volume.Snapshot, error) { return in.CreateSnapshot(ctx, spec, progress) })
}

// DeleteSnapshot destroys a snapshot.
func (p *Pool) DeleteSnapshot(ctx context.Context, id string) error {
	return p.do(func(in volume.Pool) error { return in.DeleteSnapshot(ctx, id) })
}

// GetSnapshot gives a snapshot.
func (p *Pool) GetSnapshot(id string) (volume.Snapshot, error) {
	return with(p, func(in volume.Pool) (volume.Snapshot, error) { return in.GetSnapshot(id) })
}
