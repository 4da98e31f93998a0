package static

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// A staged volume keeps its device though volumes may not name that any more: a kubelet repeats the stage. Others do not get it.
func TestA02_AStagedVolumeKeepsADeviceThatIsNoLongerAllowed(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(Options{Dir: filepath.Join(dir, "static"), Allow: []string{"/dev/loop*"}, NodesDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "disk")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "-f", "--show", file).Output()
	if err != nil {
		t.Fatal(err)
	}
	device := strings.TrimSpace(string(out))
	defer func() {
		if err := exec.Command("losetup", "-d", device).Run(); err != nil {
			t.Error(err)
		}
	}()
	attributes := map[string]string{AttrDevice: device}
	for _, id := range []string{"v", "waits"} {
		if _, err := s.Adopt(id, attributes); err != nil {
			t.Fatal(err)
		}
	}
	first, err := s.Attach(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Allow(nil); err != nil {
		t.Fatal(err)
	}
	if again, err := s.Attach(t.Context(), "v"); err != nil || !again.Device.Same(first.Device) {
		t.Errorf("the repeated stage: %+v, %v", again, err)
	}
	s.Release("v")
	for _, id := range []string{"v", "waits"} {
		if _, err := s.Attach(t.Context(), id); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s, which is not staged: %v", id, err)
		}
	}
}
