package mounter

import (
	"errors"
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// OpenByPath mounts what can be mounted only at a path. It calls mount with the superblock options,
// one in each string and with labels in quotation marks. That function mounts the source at
// scratch. OpenByPath makes a detached clone of that mount, unmounts it again and compares its
// label. Only the caller may use scratch. Package external runs mount(8) in this way.
func OpenByPath(
	scratch, source, fstype string, o Options, readOnly bool, mount func(options []string) error,
) (*Detached, error) {
	if err := CheckLabels(o); err != nil {
		return nil, err
	}
	o = separate(fstype, o)
	d, err := throughScratch(scratch, fstype+" from "+source, View{Options: o, ReadOnly: readOnly}, mount)
	if err != nil {
		return nil, err
	}
	// mount(8) may drop a label silently.
	if err := verifyLabel(o, d.Label); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", d.what, err), d.Close())
	}
	return d, nil
}

// throughScratch returns a detached clone of what mount mounts at scratch.
func throughScratch(scratch, what string, v View, mount func(options []string) error) (*Detached, error) {
	if err := ClearScratch(scratch); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		return nil, err
	}
	options := make([]string, 0, len(v.Options.Superblock))
	for _, o := range v.Options.Superblock {
		if contextOptions[o.Key] {
			o.Value = `"` + o.Value + `"`
		}
		options = append(options, o.String())
	}
	if err := mount(options); err != nil {
		return nil, errors.Join(err, os.Remove(scratch))
	}
	return takeScratch(scratch, what, v)
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
