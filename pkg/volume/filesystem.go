package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Formatter runs mkfs on a device that was proven blank. fsprogs.Programs is one.
type Formatter interface {
	Format(ctx context.Context, blank superblock.BlankDevice, fstype string, thick bool) error
}

// EnsureFilesystem formats the device of an attached volume if it was never formatted. After a crash
// at any point, the next call finishes the work, if the source is a Pool. For any other source, the remains of an interrupted mkfs are a
// fault State: the device may be another disk. The caller serialises calls for one volume. Nothing
// else may use the device.
//
// If the device holds something other than this file system, or may hold somebody's data, the error
// is a fault State and the device is untouched. A volume that was formatted once is never formatted
// again, even if it holds something else; mounting then fails. ProveBlank says how long the proof
// takes.
func EnsureFilesystem(ctx context.Context, src Source, id string, dev mounter.Device, want string, mkfs Formatter, p *Progress) error {
	if want == "" {
		return fault.New(fault.Invalid, "volume %s: no type of file system was given", id)
	}
	v, err := src.Get(id)
	if err != nil {
		return err
	}
	if v.Facts.Formatted == want {
		return nil
	}
	if v.Facts.Formatted != "" {
		return fault.New(fault.State, "volume %s was formatted with %s, and %s was asked for; nothing was changed", id, v.Facts.Formatted, want)
	}
	found, blank, err := provenBlank(ctx, src, v, dev, p)
	switch {
	case err != nil:
		return OfDevice(id, err)
	case blank.Path() == "" && (found.Content != superblock.Known || found.Type != want):
		return fault.New(fault.State, "volume %s: %s holds %s, and %s was asked for; nothing was changed", id, dev.Path, found, want)
	case blank.Path() != "" && len(fstype.Of(want).Make) == 0:
		return fault.New(fault.Invalid, "volume %s: %s is blank, and no file system of type %s can be made", id, dev.Path, want)
	case blank.Path() != "" && dev.ReadOnly:
		return fault.New(fault.State, "volume %s: %s is blank and read-only, so it cannot be formatted", id, dev.Path)
	case blank.Path() != "":
		if err := MakeFilesystem(ctx, src, v, blank, want, func() error { return mkfs.Format(ctx, blank, want, v.Thick) }); err != nil {
			return OfDevice(id, err)
		}
	}
	v.Facts.Formatting, v.Facts.Formatted = nil, want
	return src.SetFacts(id, v.Facts)
}

// OfDevice adds the volume to an error of its device, unless the error names it. A device node that goes meanwhile is a state of the
// volume.
func OfDevice(id string, err error) error {
	if text := err.Error(); !strings.HasPrefix(text, "volume "+id+":") && !strings.HasPrefix(text, "volume "+id+" ") {
		err = fmt.Errorf("volume %s: %w", id, err)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.State, "%w", err)
	}
	return err
}

// NotNoted returns the fault.Unavailable of a record in the state directory that could not be written, or removed: what the record says of
// the volume, and the way out. That code is not final, so a kubelet that gives up undoes what was done before.
func NotNoted(id, what string, err error) error {
	return fault.New(fault.Unavailable, "volume %s: %s could not be noted in the state directory: %w. Make room on its disk, or mend it: "+
		"a repeated call goes on", id, what, err)
}

// provenBlank returns what the device holds and, if it may be formatted, the proof.
func provenBlank(
	ctx context.Context, src Source, v Volume, dev mounter.Device, p *Progress,
) (found superblock.Result, blank superblock.BlankDevice, err error) {
	if v.Facts.Formatting == nil {
		return ProveBlank(ctx, src, v.ID, dev, p)
	}
	if err := idle(v.ID, dev); err != nil {
		return found, blank, err
	}
	if found, blank, err = superblock.Resume(dev.Path, *v.Facts.Formatting); err != nil || blank.Path() == "" {
		return found, blank, err
	}
	_, pool := src.(Pool)
	switch {
	case v.Facts.GivenRaw:
		err = fault.New(fault.State, "volume %s: formatting %s was begun, and then it was given out as a raw block device, so it is not formatted",
			v.ID, dev.Path)
	case found.Content == superblock.Blank: // no remains of mkfs are there, so this may be another device
		return ProveBlank(ctx, src, v.ID, dev, p)
	case !pool:
		err = fault.New(fault.State, "volume %s: formatting %s was begun and did not end, and it holds %s: it may be another device than "+
			"then, so it is not formatted again", v.ID, dev.Path, found)
	}
	if err != nil {
		blank = superblock.BlankDevice{}
	}
	return found, blank, err
}

// idle refuses a device in use: an earlier mkfs may have outlived the process that started it.
func idle(id string, dev mounter.Device) error {
	busy, err := mounter.Busy(dev.Path)
	if err == nil && busy {
		err = fault.New(fault.Busy, "volume %s: formatting %s was begun, and it is in use, perhaps by that mkfs; try again", id, dev.Path)
	}
	return err
}

// MakeFilesystem calls mkfs, which formats a device that was proven blank. EnsureFilesystem is for
// drivers; this is for those that decide themselves what may be formatted. Before mkfs, the intent is
// recorded in the volume's facts: after a crash, superblock.Resume needs it to distinguish an
// interrupted mkfs from somebody's data. If the proof turns out not to hold ([superblock.ErrNotProven]),
// the intent is taken back. The caller records Facts.Formatted afterwards. v.Facts are as Get returned
// them.
func MakeFilesystem(ctx context.Context, src Source, v Volume, blank superblock.BlankDevice, want string, mkfs func() error) error {
	if blank.Path() == "" || v.Facts.Formatted != "" {
		return fault.New(fault.State, "volume %s: no proof that its device is blank, or it was formatted before (%q)", v.ID, v.Facts.Formatted)
	}
	if err := blank.Fits(want); err != nil {
		return fmt.Errorf("volume %s: %w", v.ID, err)
	}
	if intent := blank.Intent(want); v.Facts.Formatting == nil || *v.Facts.Formatting != intent {
		v.Facts.Formatting = &intent
		if err := src.SetFacts(v.ID, v.Facts); err != nil {
			return err
		}
	}
	if err := mkfs(); err != nil {
		if errors.Is(err, superblock.ErrNotProven) && !blank.Resumed() {
			// No mkfs has left anything on the device. With the intent, the next attempt would take
			// somebody's data for an interrupted mkfs.
			v.Facts.Formatting = nil
			err = errors.Join(err, src.SetFacts(v.ID, v.Facts))
		}
		return err
	}
	if v.Thick {
		// mkfs may have discarded ranges that the volume's space was reserved for.
		_, err := src.Attach(ctx, v.ID)
		return err
	}
	return nil
}
