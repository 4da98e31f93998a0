// Package statedir keeps a daemon's state directory for one process at a time.
// Two that shared one would each undo what the other has begun.
package statedir

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Lock makes the directory if there is none, and takes it for this process. The
// lock lasts until the descriptor is closed or the process ends, however it
// ends. Call it before anything in the directory is read. Where another process
// has the directory, the error names that process.
func Lock(dir, program string) (*os.File, error) {
	f, err := lock(dir, program)
	if err != nil {
		return nil, fmt.Errorf("--state-dir %s: %w", dir, err)
	}
	return f, nil
}

func lock(dir, program string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("%w; give a directory that can be written and that survives restarts", err)
	}
	f, err := linux.Openat(nil, filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|linux.ONofollow, 0o600)
	if err != nil {
		return nil, err
	}
	err = linux.Flock(f)
	if errors.Is(err, linux.EAGAIN) {
		err = fmt.Errorf("%s uses it; stop that one, or give another directory", holder(f))
	} else if err == nil {
		err = sign(f, program)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// sign leaves word for those that come later. A full disk is no reason not to
// start: the lock holds without it.
func sign(f *os.File, program string) error {
	err := f.Truncate(0)
	if err == nil {
		_, err = fmt.Fprintf(io.NewOffsetWriter(f, 0), "%s, process %d, since %s\n", program, os.Getpid(), time.Now().UTC().Format(time.RFC3339))
	}
	if errors.Is(err, linux.ENOSPC) {
		return nil
	}
	return err
}

func holder(f *os.File) string {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 200))
	if who := strings.TrimSpace(string(b)); err == nil && who != "" {
		return who + ","
	}
	return "another process"
}
