package mounter

import (
	"context"
	"errors"
	"os"
	"sync"

	mountutils "k8s.io/mount-utils"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// mountUtils is made at first need: making it runs a program.
var mountUtils = sync.OnceValue(func() mountutils.Interface { return mountutils.NewWithoutSystemd("") })

// OpenWithHelper mounts a file system whose protocol lives in a helper program
// (nfs: mount.nfs), through mount(8). That can only mount at a path, so it does
// so in scratch, a directory that nobody but the caller uses, and takes it off
// again after a detached clone was made.
//
// mount(8) cannot be interrupted half-way without leaving a mount; the context
// is looked at before, not during.
func OpenWithHelper(ctx context.Context, scratch, source, fstype string, o Options, readOnly bool) (d *Detached, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := ClearScratch(scratch); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		return nil, err
	}
	options := make([]string, 0, len(o.Superblock))
	for _, opt := range o.Superblock {
		options = append(options, opt.String())
	}
	if err := mountUtils().MountSensitive(source, scratch, fstype, options, nil); err != nil {
		return nil, errors.Join(fault.New(fault.State, "%s from %s: %w", fstype, source, err), os.Remove(scratch))
	}
	defer func() {
		if cerr := ClearScratch(scratch); cerr != nil {
			err = errors.Join(err, cerr)
		}
		if err != nil && d != nil {
			err = errors.Join(err, d.Close())
			d = nil
		}
	}()
	root, err := linux.Openat2(nil, scratch, linux.OPath|linux.ODirectory, linux.ResolveNoSymlinks)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return (&Detached{mount: root, isDir: true, what: fstype + " from " + source}).Clone(View{Options: o, ReadOnly: readOnly})
}

// ClearScratch takes off what a crash left in a scratch directory, and removes
// the directory.
func ClearScratch(scratch string) error {
	dir, err := linux.Openat2(nil, scratch, linux.OPath|linux.ODirectory, linux.ResolveNoSymlinks)
	if errors.Is(err, linux.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	st, err := linux.StatxFile(dir)
	if err == nil && st.MountRoot {
		err = linux.DetachFile(dir)
	}
	if err := errors.Join(err, dir.Close()); err != nil {
		return err
	}
	return os.Remove(scratch)
}
