package microvm

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A QEMU that ends at once is seen at once, with its reason, also if its sockets were made for it.
func TestC19_AQEMUThatEndsAtOnce(t *testing.T) {
	dir := t.TempDir()
	image := filepath.Join(dir, "image")
	if err := os.WriteFile(image, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, user := range map[string]*User{"root": nil, "a user": {UID: 1_900_000_000, Console: io.Discard}} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		vm, err := Start(ctx, Config{Dir: filepath.Join(dir, name), Kernel: image, Initrd: image, Accel: "tcg", User: user,
			Extra: []string{"-no-such-option"}})
		if err == nil {
			vm.Kill()
		}
		end, _ := ctx.Deadline()
		if left := time.Until(end); err == nil || !strings.Contains(err.Error(), "no-such-option") || left < time.Minute {
			t.Errorf("as %s: %v, %s before the deadline", name, err, left)
		}
	}
}

// One waits for a microVM's end, and another ends it. Both go on.
func TestC19_TwoWaitForAMicroVM(t *testing.T) {
	for range 300 {
		vm := &VM{cmd: exec.Command("sleep", "100")}
		vm.cmd.Stdout = struct{ io.Writer }{io.Discard} // no file, so that its output is copied
		if err := vm.run(); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 2)
		go func() { done <- vm.Wait() }()
		go func() { vm.Kill(); done <- vm.Wait() }()
		for range 2 {
			select {
			case err := <-done:
				if err == nil || err.Error() != "signal: killed" {
					t.Fatal(err)
				}
			case <-time.After(time.Minute):
				t.Fatal("somebody waits for a microVM that has ended")
			}
		}
	}
}
