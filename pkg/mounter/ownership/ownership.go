// Package ownership gives the files of a volume to a group, as fsGroup asks:
// every file and directory readable and writable by the group, directories
// setgid so that new files inherit it, symbolic links never followed. It works
// relative to directory descriptors, so no path is too long and no name is beyond
// it, changes only what differs, and remembers on the volume itself what was
// done: a matching request looks at nothing but the root.
package ownership

import (
	"context"
	"errors"
	"os"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
)

// Policy says when the files are looked at.
type Policy string

// The policies of Kubernetes' fsGroupChangePolicy.
const (
	// OnRootMismatch looks at the files unless the record and the root say
	// that all of them have the group.
	OnRootMismatch Policy = "OnRootMismatch"
	// Always looks at every file each time.
	Always Policy = "Always"
)

// Progress counts while a walk runs.
type Progress struct {
	Looked  atomic.Int64 // files and directories
	Changed atomic.Int64
	// Refused counts files that nobody may change: immutable or append-only
	// ones, and those in read-only subvolumes.
	Refused atomic.Int64

	example atomic.Pointer[string]
}

func (p *Progress) refuse(name string) {
	p.Refused.Add(1)
	p.example.CompareAndSwap(nil, &name)
}

// Example is the name of one of the Refused files, empty for none.
func (p *Progress) Example() string {
	if s := p.example.Load(); s != nil {
		return *s
	}
	return ""
}

// Result is what was done.
type Result struct {
	Walked          bool // false: the record answered
	Looked, Changed int64
}

// What kubelet's own walk adds to the mode, pkg/volume/volume_linux.go.
const (
	fileBits = 0o660
	dirBits  = linux.ModeSetgid | 0o770
)

func wanted(i linux.Inode, gid uint32) (chgrp, chmod bool, mode uint32) {
	bits := uint32(fileBits)
	if i.IsDir() {
		bits = dirBits
	}
	mode = uint32(i.Mode) & 0o7777
	chgrp = i.GID != gid
	// A change of the group takes setuid and setgid off a file.
	chmod = mode&bits != bits || chgrp && !i.IsDir() && mode&(linux.ModeSetuid|linux.ModeSetgid) != 0
	return chgrp, chmod && !i.IsSymlink(), mode | bits
}

// State tells what the record on a volume's root says; ok is false where there
// is none.
func State(root *os.File) (r Record, ok bool, err error) {
	dir, err := linux.OpenRootDir(root)
	if err != nil {
		return Record{}, false, err
	}
	r, ok, err = read(dir)
	return r, ok, errors.Join(err, dir.Close())
}

// Doubt has the record say that a walk is due, where there is a record: somebody else may change
// what it says.
func Doubt(root *os.File) error {
	dir, err := linux.OpenRootDir(root)
	if err != nil {
		return err
	}
	r, known, err := read(dir)
	if known && r.Clean {
		r.Clean = false
		err = r.write(dir)
	}
	return errors.Join(err, dir.Close())
}

// Due tells whether Apply would look at the files: it takes time then.
func Due(root *os.File, gid uint32, policy Policy) (bool, error) {
	top, err := linux.OpenRootDir(root)
	if err != nil {
		return false, err
	}
	due, _, _, err := due(top, gid, policy)
	return due, errors.Join(err, top.Close())
}

func due(top linux.Dir, gid uint32, policy Policy) (walk, clean bool, self linux.Inode, err error) {
	record, known, err := read(top)
	if err != nil {
		return false, false, self, err
	}
	if self, err = top.Self(); err != nil {
		return false, false, self, err
	}
	clean = known && record == Record{Group: gid, Clean: true}
	chgrp, chmod, _ := wanted(self, gid)
	return !clean || policy == Always || chgrp || chmod, clean, self, nil
}

// Apply gives the tree of which root is the top directory to the group. When
// it fails or is cancelled in mid-walk, the record says so, and the next Apply
// goes on where files still differ. Where inodes is not nil and they say that
// nothing has to be changed, names are not looked at.
func Apply(ctx context.Context, root *os.File, gid uint32, policy Policy, inodes Inodes, p *Progress) (Result, error) {
	if ctx.Err() != nil {
		return Result{}, context.Cause(ctx)
	}
	top, err := linux.OpenRootDir(root)
	if err != nil {
		return Result{}, err
	}
	due, clean, self, err := due(top, gid, policy)
	if err != nil || !due {
		return Result{}, errors.Join(err, top.Close())
	}
	chgrp, chmod, mode := wanted(self, gid)
	w := &walk{gid: gid, dev: self.Dev, progress: p, top: top, clean: clean}
	if !nothingToChange(ctx, inodes, gid, self.Ino, p) {
		err = w.run(ctx)
	}
	// The root is last: who looks only at it sees the whole.
	if err == nil && (chgrp || chmod) {
		err = w.change(chgrp, chmod, func() error { return top.ChgrpSelf(gid) }, func() error { return top.ChmodSelf(mode) })
	}
	p.Looked.Add(1)
	if err == nil {
		err = failpoint.Err("ownership.walked")
	}
	if err == nil && !w.clean {
		err = Record{Group: gid, Clean: true}.write(top)
	}
	return Result{Walked: true, Looked: p.Looked.Load(), Changed: p.Changed.Load()}, errors.Join(err, top.Close())
}
