package mounter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	mountutils "k8s.io/mount-utils"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// mountUtils is created on first use, because creating it runs a program.
var mountUtils = sync.OnceValue(func() mountutils.Interface { return mountutils.NewWithoutSystemd("") })

// OpenWithHelper mounts a file system that needs a helper program (cifs: mount.cifs), through
// mount(8). mount(8) can mount only at a path, so it mounts in scratch, makes a detached clone
// and unmounts again. Only the caller may use scratch. NFS needs no helper: see OpenNFS.
//
// The context is checked before mount(8) starts, not while it runs: interrupting it would leave
// a mount behind.
func OpenWithHelper(ctx context.Context, scratch, source, fstype string, o Options, readOnly bool) (d *Detached, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := checkLabels(o); err != nil {
		return nil, err
	}
	if err := ClearScratch(scratch); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		return nil, err
	}
	o = separate(fstype, o)
	options := make([]string, 0, len(o.Superblock))
	for _, opt := range o.Superblock {
		if contextOptions[opt.Key] {
			opt.Value = `"` + opt.Value + `"`
		}
		options = append(options, opt.String())
	}
	linux.Starting()()
	if err := mountUtils().MountSensitive(source, scratch, fstype, options, nil); err != nil {
		return nil, errors.Join(fault.New(fault.State, "%s from %s: %w", fstype, source, err), os.Remove(scratch))
	}
	d, err = takeScratch(scratch, fstype+" from "+source, View{Options: o, ReadOnly: readOnly})
	if err != nil {
		return nil, err
	}
	// mount(8) may drop a label silently.
	if err := verifyLabel(o, d.Label); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", d.what, err), d.Close())
	}
	return d, nil
}

// takeScratch returns a detached clone of what is mounted at scratch, and unmounts and removes
// scratch.
func takeScratch(scratch, what string, v View) (d *Detached, err error) {
	defer func() {
		if cerr := ClearScratch(scratch); cerr != nil {
			err = errors.Join(err, cerr)
		}
		if err != nil && d != nil {
			err = errors.Join(err, d.Close())
			d = nil
		}
	}()
	root, err := linux.Openat2(linux.CWD, scratch, linux.OPath|linux.ODirectory, linux.ResolveNoSymlinks)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return (&Detached{mount: root, isDir: true, what: what}).Clone(v)
}

// ClearScratch unmounts what a crash left in a scratch directory, and removes the directory.
func ClearScratch(scratch string) error {
	dir, err := linux.Openat2(linux.CWD, scratch, linux.OPath|linux.ODirectory, linux.ResolveNoSymlinks)
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
