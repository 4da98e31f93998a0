// Package ownership gives the files of a volume to a group, as fsGroup requires: the group can
// read and write every file and directory, and directories are setgid so that new files inherit
// the group. Symbolic links are never followed. It works relative to directory descriptors, so
// no path is too long. It changes only what differs, and records the result on the volume
// itself: a repeated request examines only the root.
//
// It is for file systems with Unix owners and extended attributes, such as ext4, xfs and btrfs. For
// others (vfat, exfat) give the group as a mount option; on NFS the server decides. What nobody can
// change, such as an immutable file, is left as it is and counted in Progress.
package ownership

import (
	"context"
	"errors"
	"math"
	"os"
	"sync/atomic"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Policy selects when the files are examined.
type Policy string

// The policies of Kubernetes' fsGroupChangePolicy.
const (
	// OnRootMismatch examines the files unless the record and the root show that all files have
	// the group.
	OnRootMismatch Policy = "OnRootMismatch"
	// Always examines every file each time.
	Always Policy = "Always"
)

// Progress counts during a walk. Use a new one for each Apply.
type Progress struct {
	Looked  atomic.Int64 // files and directories
	Changed atomic.Int64
	// Refused counts files that nobody can change: immutable or append-only ones, and those in
	// read-only subvolumes.
	Refused atomic.Int64

	example atomic.Pointer[string]
}

func (p *Progress) refuse(name string) {
	p.Refused.Add(1)
	p.example.CompareAndSwap(nil, &name)
}

// Example returns the name of one of the Refused files, or "" if there is none.
func (p *Progress) Example() string {
	if s := p.example.Load(); s != nil {
		return *s
	}
	return ""
}

// Result is the result of Apply.
type Result struct {
	Walked          bool // false: the record was sufficient
	Looked, Changed int64
}

// The mode bits that kubelet's own walk adds, pkg/volume/volume_linux.go.
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
	// A change of the group clears setuid and setgid of a file.
	chmod = mode&bits != bits || chgrp && !i.IsDir() && mode&(linux.ModeSetuid|linux.ModeSetgid) != 0
	return chgrp, chmod && !i.IsSymlink(), mode | bits
}

// State reads the record on a volume's root. If there is none, ok is false.
func State(root *os.File) (r Record, ok bool, err error) {
	dir, err := linux.OpenRootDir(root)
	if err != nil {
		return Record{}, false, err
	}
	r, ok, err = read(dir)
	return r, ok, errors.Join(err, dir.Close())
}

// Doubt marks an existing record as dirty, so that the next Apply walks: somebody else may
// change the files.
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

// check refuses a policy that is unknown, with a fault Invalid.
func (p Policy) check() error {
	if p != OnRootMismatch && p != Always {
		return fault.New(fault.Invalid, "policy %q is unknown: give %s or %s", p, OnRootMismatch, Always)
	}
	return nil
}

// Due reports whether Apply would examine the files, which takes time.
func Due(root *os.File, gid uint32, policy Policy) (bool, error) {
	if err := policy.check(); err != nil {
		return false, err
	}
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

// Apply gives the tree below the directory root to the group. If it fails or is cancelled
// during the walk, the record stays dirty, and the next Apply examines all files again and
// changes those that still differ. If inodes show that nothing needs a change, it does not read
// names. A nil Progress is allowed. A policy that is neither OnRootMismatch nor Always is a fault
// Invalid.
func Apply(ctx context.Context, root *os.File, gid uint32, policy Policy, inodes Inodes, p *Progress) (Result, error) {
	if gid == math.MaxUint32 { // chown(2): leave the group as it is
		return Result{}, fault.New(fault.Invalid, "%d is no group", gid)
	}
	if err := policy.check(); err != nil {
		return Result{}, err
	}
	if p == nil {
		p = &Progress{}
	}
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
	if self.Fixed && (!clean || chgrp || chmod) { // whatever is done, nobody could note that it is
		return Result{}, errors.Join(fault.New(fault.State, "the volume's root directory is immutable or append-only, so it cannot get group %d: "+
			"remove that (chattr -i -a), in a pod without fsGroup", gid), top.Close())
	}
	w := &walk{gid: gid, dev: self.Dev, progress: p, top: top, clean: clean}
	if !nothingToChange(ctx, inodes, gid, self.Ino, p) {
		err = w.run(ctx)
	}
	// Change the root last, so that a matching root means a complete tree.
	if err == nil && (chgrp || chmod) {
		err = w.change(chgrp, chmod, func() error { return top.ChgrpSelf(gid) }, func() error { return top.ChmodSelf(mode) })
	}
	p.Looked.Add(1)
	if err == nil {
		err = failpoint.Err("ownership.walked")
	}
	if err == nil && !w.clean {
		err = Record{Group: gid, Clean: !w.missed.Load()}.write(top)
	}
	return Result{Walked: true, Looked: p.Looked.Load(), Changed: p.Changed.Load()}, errors.Join(err, top.Close())
}
