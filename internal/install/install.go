// Package install puts the programs and files of an image on a node, where containerd starts them. It replaces a file atomically, and keeps
// versions of a program that processes still run.
package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

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

// Version puts a program into a directory as NAME-VERSION, where the version is taken from its content, and makes NAME a link to it.
// Processes of an older version can start that one again by its own name. It removes older versions that nobody has open, but not the last
// one: whoever starts it may have read the link just before.
//
// It waits until others that install in the directory are done: one would remove the version that another is about to link to.
func Version(ctx context.Context, dir, name string, content []byte) error {
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
	if err := Files(dir, map[string][]byte{version: content}); err != nil {
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
	found, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	ofName := regexp.MustCompile("^" + regexp.QuoteMeta(name) + "-[0-9a-f]{12}$")
	for _, e := range found {
		if e.Name() == version || e.Name() == before || !e.Type().IsRegular() || !ofName.MatchString(e.Name()) {
			continue
		}
		if err := removeUnused(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// removeUnused removes a file, unless somebody has it open, or that cannot be told. A program that runs is open.
func removeUnused(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another installation removed it just now
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if alone, err := linux.Alone(f); err != nil || !alone {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Link makes a symbolic link, or finds it.
func Link(to, path string) error {
	if have, err := os.Readlink(path); err == nil && have == to {
		return nil
	}
	next := fmt.Sprintf("%s.%d.new", path, os.Getpid())
	if err := os.Symlink(to, next); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// file replaces a file atomically: containerd may be starting it, and another crustd may install it, too.
func file(path string, content []byte) error {
	have, err := os.ReadFile(path)
	if err == nil && bytes.Equal(have, content) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-")
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
