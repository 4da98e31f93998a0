package record

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// ErrUnusable is in the chain of what is answered about a thing whose record is
// there and cannot be read. What the kernel knows of the thing still holds.
var ErrUnusable = errors.New("its record cannot be used")

// Unusable is the answer for the thing that a record is of, where reading the
// record failed with why: the file's name, and the way out.
func Unusable(why error) error {
	return fault.New(fault.State, "%w: %w. The file was left as it is: put a good copy in its place (or start the version that wrote it), "+
		"and start this program again", ErrUnusable, why)
}

// Untold tells whether the error of a Read says nothing about the record: this process lacked descriptors or memory.
func Untold(err error) bool { return linux.Short(err) }

// Suffix of the files that SetAside has renamed.
const Suffix = ".bad"

// SetAside gives a record that cannot be used another name, durably, so that a
// new one can be written. It is kept, for people.
func SetAside(path string) error {
	if err := os.Rename(path, path+Suffix); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}
