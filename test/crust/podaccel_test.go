package crust

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What the configuration says of the accelerator reaches the pod, and its error says what is wrong. Nothing of the pod is left.
func TestC24_TheConfigurationChoosesTheAccelerator(t *testing.T) {
	t.Parallel()
	r := newPodRuntime(t, newServer(t, "qemu", ""))
	r.configure(t, "accel", "fast")
	_, err := r.start(t, "one", r.spec(t, "one", "sandbox", "/bin/busybox", "sleep", "100000"))
	if err == nil || !strings.Contains(err.Error(), `"fast": kvm, tcg (emulation) or auto`) {
		t.Errorf("%v", err)
	}
	ok(t, r.call(nil, nil, nil, "delete", "--force", "one"))
	if left, err := os.ReadDir(filepath.Join(r.pods, "one")); !os.IsNotExist(err) {
		t.Errorf("left behind: %v", left)
	}
}
