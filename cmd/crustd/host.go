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
	guest := map[string][]byte{}
	if o.guestDir != "" {
		for _, name := range []string{"vmlinuz", "pod-initramfs", guestFacts} {
			if guest[name], err = os.ReadFile(filepath.Join(filepath.Dir(self), "../share/crust-guest", name)); err != nil {
				return fmt.Errorf("the guest of pods in microVMs, to be installed on the host: %w", err)
			}
		}
	}
	runtime.LockOSThread() // until execve
	if err := linux.EnterMountNamespace(ns); err != nil {
		return fmt.Errorf("--host-mount-namespace: %w", err)
	}
	if err := installAll(o.installDir, programs); err != nil {
		return fmt.Errorf("--install-dir: %w", err)
	}
	if o.guestDir != "" {
		if err := installAll(o.guestDir, guest); err != nil {
			return fmt.Errorf("--guest-dir: %w", err)
		}
		if err := link("crust-oci", filepath.Join(o.installDir, "crust-vm")); err != nil {
			return fmt.Errorf("--install-dir: %w", err)
		}
	}
	// From now on, an exec into this container runs on the host.
	program := filepath.Join(o.installDir, "crustd")
	return linux.Exec(program, append([]string{program}, os.Args[1:]...), append(os.Environ(), entered+"=1"))
}

// guestFacts is the name of the file that says what the guest's kernel can.
const guestFacts = "guest.json"

// link makes a symbolic link, or finds it.
func link(to, path string) error {
	if have, err := os.Readlink(path); err == nil && have == to {
		return nil
	}
	next := fmt.Sprintf("%s.%d.new", path, os.Getpid())
	if err := os.Symlink(to, next); err != nil {
		return err
	}
	return os.Rename(next, path)
}

func installAll(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, content := range files {
		if err := install(filepath.Join(dir, name), content); err != nil {
			return err
		}
	}
	return nil
}

// install replaces a program atomically: containerd may be starting it, and another crustd may install it, too.
func install(path string, content []byte) error {
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
