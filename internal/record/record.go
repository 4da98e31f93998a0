// Package record stores small facts on disk as versioned JSON files that survive a crash at any
// moment: a reader sees the old content or the new, never a mixture, and never a version it does
// not understand.
package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// maxSize limits what is read, in bytes: a record has a few hundred.
const maxSize = 1 << 20

// Extension of every record's file name.
const Extension = ".json"

// unfinished ends the name of a record that is being written.
const unfinished = ".tmp"

type envelope struct {
	Kind    string          `json:"kind"`
	Version int             `json:"version"`
	Data    json.RawMessage `json:"data"`
}

// Type names a kind of record and the newest version of it that this program understands.
type Type struct {
	Kind    string
	Version int
}

// Encode returns the file content of v.
func (t Type) Encode(v any) ([]byte, error) {
	b, err := t.compact(v)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err = json.Indent(&out, b, "", "  "); err == nil {
		err = t.fits(out.Len())
	}
	return out.Bytes(), err
}

// fits refuses what Read would not read. A record that was read fits again, for each way of writing keeps its form.
func (t Type) fits(size int) error {
	if size > maxSize {
		return fmt.Errorf("%s record: %d bytes are too many to be read again", t.Kind, size)
	}
	return nil
}

// compact is Encode on one line.
func (t Type) compact(v any) ([]byte, error) {
	b, err := json.Marshal(struct {
		Kind    string `json:"kind"`
		Version int    `json:"version"`
		Data    any    `json:"data"`
	}{t.Kind, t.Version, v})
	return append(b, '\n'), err
}

// Decode reads a file's content into v. A newer version, another kind, an unknown field and a torn
// file are errors: a program that does not fully understand a record must not act on it.
func (t Type) Decode(b []byte, v any) error {
	var e envelope
	if err := strict(b, &e); err != nil {
		return fmt.Errorf("not a record: %w", err)
	}
	if e.Kind != t.Kind {
		return fmt.Errorf("a record of kind %q where %q belongs", e.Kind, t.Kind)
	}
	if e.Version < 1 || e.Version > t.Version {
		return fault.New(fault.State, "%s record of version %d; this program knows up to version %d: use a newer one", t.Kind, e.Version,
			t.Version)
	}
	if err := strict(e.Data, v); err != nil {
		return fmt.Errorf("%s record: %w", t.Kind, err)
	}
	return nil
}

func strict(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("data after the end")
	}
	return nil
}

// Write replaces the record at path durably: once it returns nil, the record survives power loss.
func (t Type) Write(path string, v any) error { return t.write(path, v, true) }

// WriteVolatile replaces the record at path atomically, for this boot only. After a crash of the
// process there is the old record or the new, or, if there was none, a torn one that Read refuses.
// A crash of the machine may leave anything. For facts that a reboot voids anyway.
func (t Type) WriteVolatile(path string, v any) error {
	b, err := t.compact(v)
	if err == nil {
		err = t.fits(len(b))
	}
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return t.write(path, v, false)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, ignoreNotExist(os.Remove(path)))
	}
	return failpoint.Err("record.created")
}

func (t Type) write(path string, v any, durable bool) (err error) {
	encode := t.Encode
	if !durable {
		encode = t.compact
	}
	b, err := encode(v)
	if err == nil {
		err = t.fits(len(b))
	}
	if err != nil {
		return err
	}
	// Each record has one writer (under its volume's lock), so one temporary name is enough; a
	// leftover of a crash is overwritten.
	tmp := path + unfinished
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil && durable {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = failpoint.Err("record.written")
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(err, ignoreNotExist(os.Remove(tmp)))
	}
	if err := failpoint.Err("record.renamed"); err != nil {
		return err
	}
	if durable {
		return SyncDir(filepath.Dir(path))
	}
	return nil
}

// Read reads the record at path; fs.ErrNotExist if there is none.
func (t Type) Read(path string, v any) error {
	b, err := content(path)
	if err != nil {
		return err
	}
	if err := t.Decode(b, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// content returns a file's content, as far as a record may be long.
func content(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxSize))
}

// Hint reads into v as much as it can of a record that Read refuses, such as one of a newer version or with unknown fields. Nothing in v is
// certain: use it only for acts that are harmless if v is wrong.
func Hint(path string, v any) error {
	b, err := content(path)
	if err != nil {
		return err
	}
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return err
	}
	return json.Unmarshal(e.Data, v)
}

// Remove deletes the record durably; a missing one is no error.
func Remove(path string) error {
	if err := RemoveVolatile(path); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// RemoveVolatile deletes a record of WriteVolatile; a missing one is no error.
func RemoveVolatile(path string) error {
	err := os.Remove(path)
	if errors.Is(err, linux.EROFS) { // the kernel says so before it checks whether there is one
		if _, missing := os.Lstat(path); errors.Is(missing, fs.ErrNotExist) {
			return nil
		}
	}
	return ignoreNotExist(err)
}

// Names lists the records in dir, without Extension. A directory that does not exist has none.
func Names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, ignoreNotExist(err)
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), Extension); ok && e.Type().IsRegular() {
			names = append(names, name)
		}
	}
	return names, nil
}

// Load is Names for the only writer of dir, before its first write. It removes what a crash left of a
// write, if it can.
func Load(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, ignoreNotExist(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), Extension+unfinished) && e.Type().IsRegular() {
			_ = os.Remove(filepath.Join(dir, e.Name())) // the next write replaces it
		}
	}
	return Names(dir)
}

// SyncDir makes renames, creations and removals in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
