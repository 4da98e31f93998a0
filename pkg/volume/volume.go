// Package volume says where volumes come from: pools that make them (loop
// files today, LVM can follow) and static sources that find what somebody else
// made (a block device, an NFS share).
//
// Callers serialise what changes a volume: of one volume no two of Attach, Detach,
// SetFacts, Delete, Expand and the like run at once. What only looks (Get, List,
// Owns, Attached, Health) may run at any time.
package volume

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Volume is what is known of a volume.
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

	// Parameters are those that it was created with. nil: nobody knows, as of
	// volumes that were made before they were kept.
	Parameters map[string]string `json:"parameters,omitzero"`

	Facts Facts `json:"facts"`
}

// Facts are what was done to a volume and what is still to do, kept with it.
type Facts struct {
	// Formatting is there while a format was begun and not seen to end.
	Formatting *superblock.Intent `json:"formatting,omitempty"`
	// Formatted is the file system that the volume was given. A volume that
	// has one, or was copied from another, is never formatted again.
	Formatted string `json:"formatted,omitempty"`
	// GivenRaw: it was staged as a raw block device once, so what is on it is
	// for its users to know: it is never formatted.
	GivenRaw bool `json:"givenRaw,omitempty"`
	// GivenToGuest: a guest's kernel had it (a runtime-assisted mount), so what is on
	// it is a pod's to make. Copies inherit it; nothing takes it back.
	GivenToGuest bool `json:"givenToGuest,omitempty"`
	// GrowDue: the device may be larger than its file system.
	GrowDue bool `json:"growDue,omitempty"`
	// IdentityDue: it is a copy, and its file system has its origin's identity.
	IdentityDue bool `json:"identityDue,omitempty"`
}

// Attachment is what a volume is on this node: a block device or a share.
type Attachment struct {
	Device mounter.Device
	Share  *Share
}

// Share is a network file system.
type Share struct{ Type, Source string }

// ErrWritesLost says that what pods wrote last did not reach where the volume's data lies.
var ErrWritesLost = loopdev.ErrWritesLost

// Releaser takes a volume away from this node. It asks the kernel for all that it
// has to know.
type Releaser interface {
	// Attached gives what Attach made, verified with the kernel; ok is false
	// when the volume is not attached. It is cheap.
	Attached(id string) (a Attachment, ok bool, err error)
	// Owns gives the volume that a device in use belongs to; ok is false when it belongs to none of these. An
	// error, and not "no", is what it gives when it cannot tell: a fault Unavailable while a pool is away.
	Owns(d mounter.Device) (id string, ok bool, err error)
	// DetachReadOnly releases the devices of AttachReadOnly but those in use.
	DetachReadOnly(ctx context.Context, id string, inUse []mounter.Device) error
	// Detach releases the volume's devices, or a fault State while they are in
	// use anywhere. ErrWritesLost is given once; a repeated call releases them.
	Detach(ctx context.Context, id string) error
}

// Source finds volumes on this node and attaches them.
type Source interface {
	Releaser
	// Get gives a volume by its id, or a fault NotFound.
	Get(id string) (Volume, error)
	// Attach makes the volume's device; one that is there already is found.
	Attach(ctx context.Context, id string) (Attachment, error)
	// AttachReadOnly makes another device of the volume, through which nobody can
	// write; DetachReadOnly releases it.
	AttachReadOnly(ctx context.Context, id string) (mounter.Device, error)
	// ForPod gives the device whose node a pod may have, for one of Attach or
	// AttachReadOnly: the pod must not be able to do with it what the driver can.
	// It lasts until that device is released.
	ForPod(ctx context.Context, id string, d mounter.Device) (mounter.Device, error)
	// Mend sets back what pods changed of the devices that they were given. What
	// cannot be set back is an error.
	Mend(ctx context.Context, id string) error
	// Refresh makes an attached device as large as its volume.
	Refresh(ctx context.Context, id string) error
	// SetFacts keeps the facts with the volume, durably.
	SetFacts(id string, facts Facts) error
	// List gives all volumes, by id.
	List() []Volume
	// Health tells what is wrong with where the volume's data lies. An empty id asks a pool
	// for what concerns all its volumes.
	Health(id string) []mounter.Ailment
}

// Answerer is a Pool with a disk that can be asked whether it takes writes.
type Answerer interface {
	// Answers returns when the disk has taken a write. It may hang.
	Answers() error
}

// Sizes are those that volumes of a pool can have, in bytes.
type Sizes struct {
	Step int64 // a size is a multiple of it,
	Fine int64 // or of this where a limit leaves no room for that
	Most int64 // the largest
}

// FileSizes are those of a volume that is a file with a loop device: multiples of a MiB, or of a
// page, up to what an offset can say.
func FileSizes() Sizes { return Sizes{Step: 1 << 20, Fine: 4096, Most: 1 << 60} }

// Pool makes volumes.
type Pool interface {
	Source
	Name() string
	// Sizes are those that its volumes can have. They are known of a pool that is away, too.
	Sizes() Sizes
	// Capacity of the pool, in bytes.
	Capacity() (Capacity, error)
	// Allocated is how many bytes of the pool a volume's data takes. Data shared with
	// snapshots counts in full. A fault NotFound if the pool has no such volume.
	Allocated(id string) (int64, error)
	// Usable is nil when volumes can be made and attached.
	Usable() error
	// Create makes a volume; one with the same name is the caller's to find.
	Create(ctx context.Context, spec Spec, p *Progress) (Volume, error)
	// Delete destroys a volume. It is refused while the volume is attached.
	Delete(ctx context.Context, id string) error
	// Expand makes the volume larger, and its device where it is attached.
	Expand(ctx context.Context, id string, size int64) (Volume, error)

	CreateSnapshot(ctx context.Context, spec SnapshotSpec, p *Progress) (Snapshot, error)
	DeleteSnapshot(ctx context.Context, id string) error
	GetSnapshot(id string) (Snapshot, error)
	ListSnapshots() []Snapshot
	// Recover undoes what an earlier process left unfinished: it thaws the
	// volumes that a copy was being taken of, and removes the unfinished copy.
	Recover(thaw Thaw) error
	// Check tells what in the pool does not fit together, and changes nothing. What an
	// operation has under way is among it.
	Check() ([]Finding, error)
	Close() error
}

// Thaw ends a freeze that a crash left of a volume. The source is the pool that asks.
type Thaw func(s Source, id string) error

// Spec is a volume to be made.
type Spec struct {
	Name   string
	Size   int64
	Thick  bool
	Block  bool
	FSType string
	// Parameters are kept with the volume, as they are.
	Parameters map[string]string

	// At most one origin. Quiesce makes a volume's data consistent for the
	// time of the copy.
	SourceSnapshot string
	SourceVolume   string
	Quiesce        Quiesce
}

// SnapshotSpec is a snapshot to be taken.
type SnapshotSpec struct {
	Name    string
	Volume  string
	Quiesce Quiesce
}

// Quiesce writes out a volume, and stops writes to it where it can, until
// Stillness.Resume is called.
type Quiesce func(ctx context.Context) (Stillness, error)

// Stillness says how still a volume stands. Where it may be written, only a copy
// that the pool makes in one instant is a copy.
type Stillness struct {
	Resume func() error
	// Writers says who may write all the same; empty: nobody that the driver
	// knows of.
	Writers string
	// Written counts what was written to the volume's device; nil where nothing
	// can be: there is no device, or its file system is frozen.
	Written func() (mounter.Written, error)
}

// Snapshot is a copy of a volume at one time.
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

// Capacity is how much a pool holds, in bytes.
type Capacity struct {
	Total, Available int64 // of what the pool lies on
	Used             int64 // by volumes and snapshots; what they share counts once
	Promised         int64 // the sizes of volumes, and what snapshots hold
	Left             int64 // what can still be promised
	Reserve          int64 // kept for the pool's own records
}

// NearlyFull tells whether less than a twentieth is left.
func (c Capacity) NearlyFull() bool { return c.Available < c.Total/20 }

// Progress is how far a long operation has come; it may be read while the
// operation runs.
type Progress struct {
	done, total atomic.Int64
	text        atomic.Pointer[func() string]
}

// Describe has String answer with f instead, for work that is not copying.
func (p *Progress) Describe(f func() string) { p.text.Store(&f) }

// Start sets what there is to do, in bytes.
func (p *Progress) Start(total int64) { p.total.Store(total) }

// Add counts what was done.
func (p *Progress) Add(n int64) { p.done.Add(n) }

// String is "1.5 of 10.0 GiB copied", empty before Start.
func (p *Progress) String() string {
	if f := p.text.Load(); f != nil {
		return (*f)()
	}
	total := p.total.Load()
	if total == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f of %.1f GiB copied", float64(p.done.Load())/(1<<30), float64(total)/(1<<30))
}
