// Package install puts the programs and files of an image on a node, where containerd starts them. It replaces files atomically, and keeps
// the versions of a program that still run.
package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Files puts files into a directory, by their names.
func Files(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, content := range files {
		if err := file(filepath.Join(dir, name), content); err != nil {
			return err
		}
	}
	return nil
}

// Version installs a program as NAME-VERSION, where VERSION is derived from the content, and makes NAME a link to it. So a process of an
// older version can start its own version again, by that name. Version removes older versions that nobody has open, except the one that
// NAME linked to before: somebody may have read the link just before it changed. What cannot be removed is logged.
//
// Installations in one directory wait for each other: otherwise one could remove the version to which another is about to link.
func Version(ctx context.Context, log *slog.Logger, dir, name string, content []byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := linux.FlockWithin(ctx, lock); err != nil {
		return fmt.Errorf("others install in %s: %w", dir, err)
	}
	sum := sha256.Sum256(content)
	version := name + "-" + hex.EncodeToString(sum[:6])
	if err := file(filepath.Join(dir, version), content); err != nil {
		return err
	}
	link := filepath.Join(dir, name)
	before, err := os.Readlink(link)
	if err != nil {
		before = "" // no link yet
	}
	if err := Link(version, link); err != nil {
		return err
	}
	if err := removeOthers(dir, name, version, before); err != nil {
		log.Warn("an older version could not be removed", "directory", dir, "error", err)
	}
	return nil
}

// removeOthers removes the versions of a program that nobody has open, except those in keep. It also removes files that killed
// installations left.
func removeOthers(dir, name string, keep ...string) error {
	found, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	versions := regexp.MustCompile("^" + regexp.QuoteMeta(name) + "-[0-9a-f]{12}(" + regexp.QuoteMeta(unfinished) + "[0-9]+)?$")
	var errs []error
	for _, e := range found {
		if !slices.Contains(keep, e.Name()) && e.Type().IsRegular() && versions.MatchString(e.Name()) {
			errs = append(errs, removeUnused(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// removeUnused removes a file unless somebody has it open, or that is unknown. A running program counts as open.
func removeUnused(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if alone, err := linux.Alone(f); err != nil || !alone {
		return nil
	}
	return os.Remove(path)
}

// Link makes path a symbolic link to a target, unless it is one already.
func Link(to, path string) error {
	if have, err := os.Readlink(path); err == nil && have == to {
		return nil
	}
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) { // of an installation that was killed
		return err
	}
	if err := os.Symlink(to, next); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// unfinished is in the names of files that are being written.
const unfinished = ".new-"

// file replaces a file atomically: containerd may be starting it, and another crustd may install it, too.
func file(path string, content []byte) error {
	have, err := os.ReadFile(path)
	if err == nil && bytes.Equal(have, content) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+unfinished)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Chmod(0o755), f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
