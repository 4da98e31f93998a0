package record

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Dir is a directory with records of one kind, which one process at a time writes.
type Dir[R any] struct {
	Path string
	Type Type
	// Name returns the name of a record's file, without Extension. With nil, a record may lie in any
	// file.
	Name func(R) string
}

// ErrMisplaced is in the error chain of a record that could be read and is in another's file.
var ErrMisplaced = errors.New("the record does not belong there")

// Name makes a file's name, without Extension, from texts of any length and with any bytes.
func Name(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:16])
}

// File returns the path of the file with this name.
func (d Dir[R]) File(name string) string { return filepath.Join(d.Path, name+Extension) }

// Load makes the directory if it is missing, and calls visit for each of its records, before the first
// write. An error of Read, and of a record in another's file, is handed to visit: only the
// caller knows what it means for the object. Load returns the first error of visit, and every error
// that says nothing about a record (Untold), because then no record can be judged.
func (d Dir[R]) Load(visit func(path string, r R, err error) error) error {
	if err := os.MkdirAll(d.Path, 0o700); err != nil {
		return err
	}
	names, err := Load(d.Path)
	if err != nil {
		return err
	}
	for _, name := range names {
		path := d.File(name)
		var r R
		err := d.Type.Read(path, &r)
		if Untold(err) {
			return err
		}
		if err == nil && d.Name != nil && d.Name(r) != name {
			err = fmt.Errorf("%s: %w: its place is %s%s", path, ErrMisplaced, d.Name(r), Extension)
		}
		if err := visit(path, r, err); err != nil {
			return err
		}
	}
	return nil
}
