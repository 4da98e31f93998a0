package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/crust-csi/crust-csi/internal/install"
	"github.com/crust-csi/crust-csi/internal/linux"
)

// entered is set in the environment of the program that enterHost starts.
const entered = "CRUSTD_ENTERED"

// enterHost leaves a container's mount namespace for the host's, where sandboxes and their state
// must be, and starts this program again there. It returns only on failure.
func enterHost(o *options, log *slog.Logger) error {
	ns, err := linux.Open(o.hostNamespace, os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("--host-mount-namespace: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	programs := map[string][]byte{}
	for _, name := range []string{"crustd", runtimeName, "crustctl"} {
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
	// Pods in microVMs go on with the version that they began with.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := install.Version(ctx, log, o.installDir, runtimeName, programs[runtimeName]); err != nil {
		return fmt.Errorf("--install-dir: %w", err)
	}
	delete(programs, runtimeName)
	if err := install.Files(o.installDir, programs); err != nil {
		return fmt.Errorf("--install-dir: %w", err)
	}
	if o.guestDir != "" {
		if err := install.Files(o.guestDir, guest); err != nil {
			return fmt.Errorf("--guest-dir: %w", err)
		}
		if err := install.Link(runtimeName, filepath.Join(o.installDir, "crust-vm")); err != nil {
			return fmt.Errorf("--install-dir: %w", err)
		}
	}
	// From now on, an exec into this container runs on the host.
	program := filepath.Join(o.installDir, "crustd")
	return linux.Exec(program, append([]string{program}, os.Args[1:]...), append(os.Environ(), entered+"=1"))
}

// runtimeName is the OCI runtime's name, for containerd.
const runtimeName = "crust-oci"

// guestFacts is the name of the file that says what the guest's kernel can.
const guestFacts = "guest.json"
