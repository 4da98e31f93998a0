// Package statedir reserves a daemon's state directory for one process at a time. Two processes
// that shared one would undo each other's work.
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

// Lock makes the directory if necessary, and locks it for this process. The lock lasts until the
// descriptor is closed or the process ends in any way. Call it before reading anything in the
// directory. If another process has the directory, the error names it.
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
	f, err := linux.Openat(linux.CWD, filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE|linux.ONofollow, 0o600)
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

// sign records the owner for later processes. A full disk does not prevent the start: the lock
// holds without it.
func sign(f *os.File, program string) error {
	err := f.Truncate(0)
	if err == nil {
		_, err = fmt.Fprintf(io.NewOffsetWriter(f, 0), "%s, process %d, since %s\n", program, os.Getpid(),
			time.Now().UTC().Format(time.RFC3339))
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
