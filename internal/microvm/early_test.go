package microvm

import (
	"context"
	"io"
	"os"
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
