// Package volume defines the sources of volumes: pools, which make them (today loop files; LVM
// can follow), and static sources, which find what somebody else made (a block device, an NFS
// share).
//
// Callers must serialize calls that change a volume: at most one of Attach, Detach, SetFacts,
// Delete, Expand and similar runs for a volume at a time. Calls that only read (Get, List,
// Owns, Attached, Health) may run at any time.
package volume

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Volume describes a volume.
type Volume struct {
	ID      string    `json:"id"`
	Name    string    `json:"name,omitempty"` // the name it was created under
	Size    int64     `json:"sizeBytes"`
	Created time.Time `json:"created"`
	Thick   bool      `json:"thick,omitempty"` // its space is reserved
	Block   bool      `json:"block,omitempty"` // created for raw block access
	FSType  string    `json:"fsType,omitempty"`
	Share   bool      `json:"share,omitempty"` // a network file system

	SourceSnapshot string `json:"sourceSnapshot,omitempty"`
	SourceVolume   string `json:"sourceVolume,omitempty"`

	// Parameters are those of its creation; nil if unknown, as for volumes older than this
	// field.
	Parameters map[string]string `json:"parameters,omitzero"`

	Facts Facts `json:"facts"`
}

// Facts record what was done to a volume and what remains to do. They are stored with it.
type Facts struct {
	// Formatting is set while a format has begun and is not known to have ended.
	Formatting *superblock.Intent `json:"formatting,omitempty"`
	// Formatted is the file system that the volume was given. A volume that has one is never formatted again. A copy has
	// that of its origin.
	Formatted string `json:"formatted,omitempty"`
	// GivenRaw means that it was staged as a raw block device once. Only its users know its
	// content, so it is never formatted.
	GivenRaw bool `json:"givenRaw,omitempty"`
	// GivenToGuest means that a guest's kernel had it (a runtime-assisted mount), so a pod
	// controls its content. Copies inherit it. pkg/driver resets it when it formats the volume, after a
	// proof that the device is blank.
	GivenToGuest bool `json:"givenToGuest,omitempty"`
	// GrowDue means that the device may be larger than its file system.
	GrowDue bool `json:"growDue,omitempty"`
	// IdentityDue means that it is a copy whose file system still has the identity of its
	// origin.
	IdentityDue bool `json:"identityDue,omitempty"`
}

// Attachment is the form of a volume on this node: a block device or a share.
type Attachment struct {
	Device mounter.Device
	Share  *Share
}

// Share is a network file system.
type Share struct{ Type, Source string }

// ErrWritesLost means that the last writes of pods did not reach the volume's storage.
var ErrWritesLost = loopdev.ErrWritesLost

// ErrUnusable is in the error chain of Get for a volume whose record exists and cannot be read. The volume's mounts and devices stay valid:
// a pod keeps the volume, and nothing is deleted.
var ErrUnusable = record.ErrUnusable

// Releaser detaches volumes from this node. Pools keep no records of that; they ask the kernel. A static source knows what is attached
// only until its process ends: see StaticSource.Remember.
type Releaser interface {
	// Attached returns what Attach made, verified with the kernel; ok is false if the volume is
	// not attached. It is cheap.
	Attached(id string) (a Attachment, ok bool, err error)
	// Owns returns the volume to which a device in use belongs, one of Attach, AttachReadOnly or
	// ForPod; ok is false if it belongs to none of this source. If it cannot tell, it returns an error: a fault Unavailable while a
	// pool is unavailable.
	Owns(d mounter.Device) (id string, ok bool, err error)
	// DetachReadOnly releases the devices of AttachReadOnly, except those in use: what targets
	// show, as AttachReadOnly or ForPod returned it.
	DetachReadOnly(ctx context.Context, id string, inUse []mounter.Device) error
	// Detach releases the volume's devices. It returns a fault State while a file system on them
	// is mounted anywhere, or somebody has them open exclusively. A device node at a pod's target
	// does not count: the caller knows what it published. It returns ErrWritesLost once; a repeated call releases the devices.
	Detach(ctx context.Context, id string) error
}

// Source finds volumes on this node and attaches them.
type Source interface {
	Releaser
	// Get returns a volume by its id, a fault NotFound, or a fault State with ErrUnusable in its chain.
	Get(id string) (Volume, error)
	// Attach makes the volume's device, or returns the existing one.
	Attach(ctx context.Context, id string) (Attachment, error)
	// AttachReadOnly makes another device of the volume, which takes no writes. As a rule, each
	// call makes a new one. DetachReadOnly releases it. A volume that is not attached is a fault State.
	AttachReadOnly(ctx context.Context, id string) (mounter.Device, error)
	// ForPod returns the device whose node a pod may have, for a device of Attach or
	// AttachReadOnly. The pod must not be able to do with it what the driver can. A repeated call
	// for one device returns the same. It exists until that device is released.
	ForPod(ctx context.Context, id string, d mounter.Device) (mounter.Device, error)
	// RestoreDevices reverts what pods changed on the devices that they were given. It returns an error
	// for what cannot be reverted.
	RestoreDevices(ctx context.Context, id string) error
	// Refresh grows an attached device to the size of its volume.
	Refresh(ctx context.Context, id string) error
	// SetFacts stores the facts with the volume, durably.
	SetFacts(id string, facts Facts) error
	// List returns all volumes, by id.
	List() []Volume
	// Health reports problems of the volume's storage. With an empty id, a pool reports what
	// concerns all its volumes.
	Health(id string) []mounter.Ailment
}

// Answerer is a Pool that can test whether its disk takes writes.
type Answerer interface {
	// Answers returns after the disk has taken a write. It may hang.
	Answers() error
}

// Sizes describes the possible sizes of a pool's volumes, in bytes.
type Sizes struct {
	Step int64 // sizes are multiples of Step
	Fine int64 // the step of a copy that has its origin's size, and of a size for which a limit allows no multiple of Step
	Most int64 // the largest size
}

func (s Sizes) check() error {
	if s.Fine <= 0 || s.Step < s.Fine || s.Step%s.Fine != 0 || s.Most < s.Fine {
		return fault.New(fault.Invalid, "sizes %+v: want 0 < Fine <= Step, Fine <= Most, and Step a multiple of Fine", s)
	}
	return nil
}

// Refuse returns a fault OutOfRange for a size that no volume can have.
func (s Sizes) Refuse(size int64) error {
	if size <= 0 || size > s.Most || size%s.Fine != 0 {
		return fault.New(fault.OutOfRange, "a volume of %d bytes cannot be made: want a multiple of %d, at most %d", size, s.Fine, s.Most)
	}
	return nil
}

// FileSizes returns the sizes of a volume that is a file with a loop device: multiples of 1
// MiB, or of a page, up to 1<<60.
func FileSizes() Sizes { return Sizes{Step: 1 << 20, Fine: 4096, Most: 1 << 60} }

// Pool makes volumes.
type Pool interface {
	Source
	Name() string
	// Sizes returns the possible sizes of its volumes, also while the pool is unavailable.
	Sizes() Sizes
	// Capacity returns the capacity of the pool, in bytes.
	Capacity() (Capacity, error)
	// Allocated returns the bytes that a volume's data takes in the pool. Data shared with
	// snapshots counts in full. It is a fault NotFound if the pool has no such volume.
	Allocated(id string) (int64, error)
	// Usable returns nil if volumes can be made and attached.
	Usable() error
	// Create makes a volume. The caller must look for one with the same name first, and round the
	// size: one that is no multiple of Sizes().Fine is a fault OutOfRange, except for a copy.
	Create(ctx context.Context, spec Spec, p *Progress) (Volume, error)
	// Delete detaches and destroys a volume. It fails while the device is in use. It succeeds
	// if the volume does not exist.
	Delete(ctx context.Context, id string) error
	// Expand grows the volume to a size in bytes, rounded as for Create, and its device if it is
	// attached. A smaller size changes nothing.
	Expand(ctx context.Context, id string, size int64) (Volume, error)

	CreateSnapshot(ctx context.Context, spec SnapshotSpec, p *Progress) (Snapshot, error)
	DeleteSnapshot(ctx context.Context, id string) error
	GetSnapshot(id string) (Snapshot, error)
	ListSnapshots() []Snapshot
	// Recover is called once, before any other call. It undoes what an earlier process left unfinished: it thaws volumes that were being
	// copied and removes the unfinished copies. It may call thaw later, too, from any goroutine,
	// if a volume cannot be thawed.
	Recover(thaw Thaw) error
	// Check reports inconsistencies in the pool and changes nothing. Operations in progress may
	// show up in it.
	Check() ([]Finding, error)
	Close() error
}

// Thaw ends a freeze of a volume that a crash left. The source is the calling pool. Only s may be
// asked: a wrapper of the pool may be locked meanwhile. A pool whose volumes are never frozen by
// Quiesce may be recovered with a function that does nothing.
type Thaw func(s Source, id string) error

// Spec describes a volume to be made.
type Spec struct {
	Name   string
	Size   int64
	Thick  bool
	Block  bool
	FSType string
	// Parameters are stored with the volume, unchanged.
	Parameters map[string]string

	// At most one origin. Quiesce makes the origin's data consistent during the copy.
	SourceSnapshot string
	SourceVolume   string
	Quiesce        Quiesce
}

// SnapshotSpec describes a snapshot to be taken.
type SnapshotSpec struct {
	Name    string
	Volume  string
	Quiesce Quiesce
}

// Quiesce writes back a volume and, if possible, stops writes to it until Stillness.Resume is
// called.
type Quiesce func(ctx context.Context) (Stillness, error)

// Stillness tells how far writes to a volume are stopped. If writes remain possible, only a
// copy that the pool makes atomically is consistent.
type Stillness struct {
	Resume func() error
	// Writers names who may still write; empty: nobody known to the driver.
	Writers string
	// Written counts the writes to the volume's device. It is nil if none are possible: there
	// is no device, or its file system is frozen.
	Written func() (mounter.Written, error)
}

// Snapshot is a point-in-time copy of a volume.
type Snapshot struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Volume  string    `json:"volume"`
	Size    int64     `json:"sizeBytes"`
	Created time.Time `json:"created"`
	FSType  string    `json:"fsType,omitempty"`
	Block   bool      `json:"block,omitempty"`
	Facts   Facts     `json:"facts"` // the volume's, when it was taken
}

// Capacity is the capacity of a pool, in bytes.
type Capacity struct {
	Total, Available int64 // of the underlying file system or disk
	Used             int64 // by volumes and snapshots; shared data counts once
	Promised         int64 // the sizes of volumes, and the data that snapshots hold
	Left             int64 // what can still be promised
	Reserve          int64 // kept for the pool's own records
}

// NearlyFull reports whether less than a twentieth is left.
func (c Capacity) NearlyFull() bool { return c.Available < c.Total/20 }

// Progress tracks a long operation. It may be read while the operation runs. All methods accept
// a nil Progress.
type Progress struct {
	done, total atomic.Int64
	text        atomic.Pointer[func() string]
}

// Describe makes String return f(), for work other than copying.
func (p *Progress) Describe(f func() string) {
	if p != nil {
		p.text.Store(&f)
	}
}

// Start sets the total, in bytes.
func (p *Progress) Start(total int64) {
	if p != nil {
		p.total.Store(total)
	}
}

// Add counts completed bytes.
func (p *Progress) Add(n int64) {
	if p != nil {
		p.done.Add(n)
	}
}

// String returns "1.5 of 10.0 GiB copied", or "" before Start.
func (p *Progress) String() string {
	if p == nil {
		return ""
	}
	if f := p.text.Load(); f != nil {
		return (*f)()
	}
	total := p.total.Load()
	if total == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f of %.1f GiB copied", float64(p.done.Load())/(1<<30), float64(total)/(1<<30))
}
