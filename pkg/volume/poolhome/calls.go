package poolhome

import (
	"context"
	"errors"

	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Name returns the pool's name.
func (p *Pool) Name() string { return p.o.Name }

// Sizes returns the sizes of the pool. Before the pool was first available, nothing can be made
// in it, and the result does not matter.
func (p *Pool) Sizes() volume.Sizes {
	if in := p.known(); in != nil {
		return in.Sizes()
	}
	return volume.FileSizes()
}

// Usable returns the pool's Usable, or why it is unavailable.
func (p *Pool) Usable() error {
	in, err := p.here()
	if err != nil {
		return err
	}
	return in.Usable()
}

// Recover recovers the pool now or when it becomes available. If that fails, the next call
// opens and recovers it again. Such a failure must not stop the driver, so it returns nil.
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

// recover recovers a pool that was opened before Recover was called. The caller holds mu.
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

// Owns returns the volume to which a device in use belongs.
func (p *Pool) Owns(d mounter.Device) (string, bool, error) {
	in, err := p.here()
	if err == nil {
		return in.Owns(d)
	}
	if p.o.Foreign != nil {
		if foreign, ferr := p.o.Foreign(d); foreign && ferr == nil {
			return "", false, nil
		}
	}
	return "", false, err
}

// List returns the known volumes.
func (p *Pool) List() []volume.Volume {
	if in := p.known(); in != nil {
		return in.List()
	}
	return nil
}

// ListSnapshots returns the known snapshots.
func (p *Pool) ListSnapshots() []volume.Snapshot {
	if in := p.known(); in != nil {
		return in.ListSnapshots()
	}
	return nil
}

// Health reports problems of the volume's storage.
func (p *Pool) Health(id string) []mounter.Ailment {
	in, err := p.here()
	if err != nil {
		return []mounter.Ailment{{Reason: "PoolIsAway", Message: err.Error(), Fatal: true}}
	}
	return in.Health(id)
}

// with calls f with the pool, if it is available.
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

// The remaining methods call those of the pool, if it is available.

// Get returns a volume.
func (p *Pool) Get(id string) (volume.Volume, error) {
	return with(p, func(in volume.Pool) (volume.Volume, error) { return in.Get(id) })
}

// Allocated returns the bytes that a volume takes in the pool.
func (p *Pool) Allocated(id string) (int64, error) {
	return with(p, func(in volume.Pool) (int64, error) { return in.Allocated(id) })
}

// Capacity returns the pool's capacity.
func (p *Pool) Capacity() (volume.Capacity, error) { return with(p, volume.Pool.Capacity) }

// Check reports inconsistencies in the pool.
func (p *Pool) Check() ([]volume.Finding, error) { return with(p, volume.Pool.Check) }

// Attached returns what Attach made.
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

// ForPod returns the device whose node a pod may have.
func (p *Pool) ForPod(ctx context.Context, id string, d mounter.Device) (mounter.Device, error) {
	return with(p, func(in volume.Pool) (mounter.Device, error) { return in.ForPod(ctx, id, d) })
}

// RestoreDevices reverts what pods changed on their devices.
func (p *Pool) RestoreDevices(ctx context.Context, id string) error {
	return p.do(func(in volume.Pool) error { return in.RestoreDevices(ctx, id) })
}

// Refresh grows an attached device to the size of its volume.
func (p *Pool) Refresh(ctx context.Context, id string) error {
	return p.do(func(in volume.Pool) error { return in.Refresh(ctx, id) })
}

// SetFacts stores the facts with the volume.
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

// Expand grows a volume.
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

// GetSnapshot returns a snapshot.
func (p *Pool) GetSnapshot(id string) (volume.Snapshot, error) {
	return with(p, func(in volume.Pool) (volume.Snapshot, error) { return in.GetSnapshot(id) })
}
