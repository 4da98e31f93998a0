// Package engine mounts a volume that is attached to a sandbox, on any kernel: the host's for a
// mount namespace, the guest's for a microVM. It runs pkg/mounter's steps in the order of the KEP.
package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Request says how to mount a volume.
type Request struct {
	Device   mounter.Device
	Type     string
	Options  mounter.Options
	ReadOnly bool
	Group    *uint32 // the pod's fsGroup
	Policy   ownership.Policy
	// UserNamespace whose ids the mount shows the files in; nil for none.
	UserNamespace *os.File
	// Scratch is a directory for file systems that take some options only through mount(2); see
	// mounter.Filesystem.
	Scratch string
	NoPanic bool // set on the host's kernel; see mounter.Filesystem
	// Step is called when one of the Steps begins, its result with the error at its end. May be
	// nil.
	Step func(name string) (end func(error))
}

// Steps of Open that may take long.
const (
	StepMount     = "mount"
	StepGrow      = "grow file system"
	StepOwnership = "give files to group"
)

// step runs f as one of the Steps.
func (r Request) step(name string, f func() error) error {
	if r.Step == nil {
		return f()
	}
	end := r.Step(name)
	err := f()
	end(err)
	return err
}

// SuperblockOptions returns the options to mount the device with: those of the request, and what its type and group ask for.
func (r Request) SuperblockOptions() (mounter.Options, error) {
	o, row := r.Options, fstype.Of(r.Type)
	if row.Copy != "" {
		o = o.With(row.Copy, "")
	}
	if row.GroupByOption && r.Group != nil {
		return o.WithGroup(*r.Group)
	}
	return o, nil
}

// Identify reads what is on the device. Anything but a file system of the request's type is a fault State.
func (r Request) Identify() (superblock.Result, error) {
	found, err := superblock.Identify(r.Device.Path, r.Type)
	if err == nil && (found.Content != superblock.Known || found.Type != r.Type) {
		err = fault.New(fault.State, "%s holds %s, and %s was asked for; nothing was changed", r.Device.Path, found, r.Type)
	}
	return found, err
}

// Open mounts the volume detached: nobody sees it before it is complete. It grows a file system
// that is smaller than its device, unless this process may not.
func Open(ctx context.Context, r Request) (*mounter.Detached, error) {
	o, err := r.SuperblockOptions()
	if err != nil {
		return nil, err
	}
	found, err := r.Identify() // before the kernel parses it
	if err != nil {
		return nil, err
	}
	size, err := mounter.DeviceSize(r.Device)
	if err != nil {
		return nil, err
	}
	var m *mounter.Detached
	err = r.step(StepMount, func() error {
		m, err = mounter.Open(mounter.Filesystem{Device: r.Device, Type: r.Type, Options: o, Scratch: r.Scratch, NoPanic: r.NoPanic})
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := prepare(ctx, r, m, mounter.Unfilled(found, size)); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func prepare(ctx context.Context, r Request, m *mounter.Detached, unfilled bool) error {
	dir, err := m.Dir()
	if err != nil {
		return err
	}
	defer dir.Close()
	if !r.ReadOnly && !r.Device.ReadOnly && !r.Options.ReadOnly() {
		if unfilled && fstype.Of(r.Type).Grows() {
			grow := func() error {
				if err := mounter.Grow(dir, r.Type, r.Device); !errors.Is(err, mounter.ErrGrowOffline) {
					return err
				}
				return nil
			}
			if err := r.step(StepGrow, grow); err != nil {
				return err
			}
		}
		if r.Group != nil && !fstype.Of(r.Type).GroupByOption {
			inodes := ownership.InodesOf(r.Device.Path, r.Type)
			var p ownership.Progress
			walk := func() error {
				_, err := ownership.Apply(ctx, dir, *r.Group, r.Policy, inodes, &p)
				return err
			}
			if err := r.step(StepOwnership, walk); err != nil {
				return fmt.Errorf("giving its files to group %d: %w (%d looked at)", *r.Group, err, p.Looked.Load())
			}
		}
	}
	return m.Change(mounter.View{Options: r.Options, ReadOnly: r.ReadOnly, UserNamespace: r.UserNamespace})
}

// Grow makes a mounted file system fill its device.
func Grow(s *mounter.State, fstype string, dev mounter.Device) error {
	dir, err := s.Dir()
	if err != nil {
		return err
	}
	defer dir.Close()
	return mounter.Grow(dir, fstype, dev)
}

// Name returns a file name for a path or an id.
func Name(path string) string {
	sum := sha256.Sum256([]byte(path))
	return hex.EncodeToString(sum[:16])
}
