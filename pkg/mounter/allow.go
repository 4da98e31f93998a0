package mounter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Pattern names block devices that a caller may name: the absolute path of one, or a pattern of paths for filepath.Match.
type Pattern string

// Check returns a fault.Invalid for a pattern that is malformed or not absolute.
func (p Pattern) Check() error {
	if _, err := filepath.Match(string(p), ""); err != nil || !filepath.IsAbs(string(p)) {
		return fault.New(fault.Invalid, "%q is no absolute path or pattern", string(p))
	}
	return nil
}

// Matches reports whether the pattern permits a path. literally means that the pattern is this path.
func (p Pattern) Matches(path string) (ok, literally bool) {
	if string(p) == path {
		return true, true
	}
	ok, err := filepath.Match(string(p), path)
	return ok && err == nil, false
}

// FindExact finds the device at a path. Unless literally is set, it refuses a path through a symbolic link, and a partition: a pattern for
// disks would match their partitions by accident. Such a path is a fault.Invalid, and a missing device a fault.State.
func FindExact(path string, literally bool) (Device, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return Device{}, absent(path, err)
	}
	if real != path && !literally { // where it leads is not even opened
		return Device{}, fault.New(fault.Invalid, "is a symbolic link to %s, which a pattern does not permit", real)
	}
	d, err := FindDevice(real)
	if err != nil {
		return Device{}, err
	}
	if !literally {
		_, err := os.Stat(fmt.Sprintf("/sys/dev/block/%d:%d/partition", d.Major, d.Minor))
		if err == nil {
			return Device{}, fault.New(fault.Invalid, "is a partition, which a pattern does not permit")
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return Device{}, fmt.Errorf("whether %s is a partition: %w", path, err)
		}
	}
	d.Path = path
	return d, nil
}

// FindNamed finds the device at a path, through symbolic links: the names below /dev/disk are links. A missing device is a
// fault.State.
func FindNamed(path string) (Device, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return Device{}, absent(path, err)
	}
	return FindDevice(real)
}

// noDevice is the error of linux.OpenBlock, as a state of this node where the path leads to no block device.
func noDevice(path string, err error) error {
	if errors.Is(err, linux.ENOTBLK) {
		return fault.New(fault.State, "%s is no block device", path)
	}
	return absent(path, err)
}

// absent makes a missing device a state of this node.
func absent(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.State, "device %s does not exist on this node: %w", path, fs.ErrNotExist)
	}
	return err
}
