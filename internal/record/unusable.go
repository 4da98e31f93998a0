package record

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// ErrUnusable is in the error chain for an object whose record exists and cannot be read. The
// kernel's state of the object is still valid.
var ErrUnusable = errors.New("its record cannot be used")

// Unusable returns the error for an object whose record could not be read because of why: the
// file's name, and a remedy.
func Unusable(why error) error {
	return fault.New(fault.State, "%w: %w. The file was left as it is: put a good copy in its place (or start the version that wrote it), "+
		"and start this program again", ErrUnusable, why)
}

// Untold reports whether an error of Read says nothing about the record: this process ran out of
// descriptors or memory.
func Untold(err error) bool { return linux.Short(err) }

// Suffix of the files that SetAside has renamed.
const Suffix = ".bad"

// SetAside renames an unusable record, durably, so that a new one can be written. The old one is
// kept for inspection.
func SetAside(path string) error {
	if err := os.Rename(path, path+Suffix); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}
