package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// entered is set in the environment of the program that enterHost starts.
const entered = "CRUSTD_ENTERED"

// enterHost leaves a container's mount namespace for the host's, where sandboxes and their state
// must be, and starts this program again there. It returns only on failure.
func enterHost(o *options) error {
	ns, err := linux.Open(o.hostNamespace, os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("--host-mount-namespace: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	programs := map[string][]byte{}
	for _, name := range []string{"crustd", "crust-oci", "crustctl"} {
		if programs[name], err = os.ReadFile(filepath.Join(filepath.Dir(self), name)); err != nil {
			return fmt.Errorf("to be installed on the host: %w", err)
		}
	}
	runtime.LockOSThread() // until execve
	if err := linux.EnterMountNamespace(ns); err != nil {
		return fmt.Errorf("--host-mount-namespace: %w", err)
	}
	if err := os.MkdirAll(o.installDir, 0o755); err != nil {
		return fmt.Errorf("--install-dir: %w", err)
	}
	for name, content := range programs {
		if err := install(filepath.Join(o.installDir, name), content); err != nil {
			return fmt.Errorf("--install-dir: %w", err)
		}
	}
	// From now on, an exec into this container runs on the host.
	program := filepath.Join(o.installDir, "crustd")
	return linux.Exec(program, append([]string{program}, os.Args[1:]...), append(os.Environ(), entered+"=1"))
}

// install replaces a program atomically: containerd may be starting it.
func install(path string, content []byte) error {
	have, err := os.ReadFile(path)
	if err == nil && bytes.Equal(have, content) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	next := path + ".new"
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(0o755), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(next, path)
}
