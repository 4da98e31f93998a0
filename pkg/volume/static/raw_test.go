package static

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// What a target shows is known to be the volume's, and stays while it does, though a pod has a mapped device instead of the volume's own
// (where the kernel has device-mapper, as in guests).
func TestA01_APodsDeviceIsTheVolumes(t *testing.T) {
	dir := t.TempDir()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	s, err := Open(Options{Dir: filepath.Join(dir, "static"), Allow: []string{"/dev/loop*"}, NodesDir: dir})
	check(err)
	file := filepath.Join(dir, "disk")
	check(os.WriteFile(file, make([]byte, 1<<20), 0o600))
	out, err := exec.Command("losetup", "-f", "--show", file).Output()
	check(err)
	device := strings.TrimSpace(string(out))
	defer func() { check(exec.Command("losetup", "-d", device).Run()) }()
	_, err = s.Adopt("v", map[string]string{AttrDevice: device})
	check(err)
	a, err := s.Attach(t.Context(), "v")
	check(err)
	reader, err := s.AttachReadOnly(t.Context(), "v")
	check(err)
	for _, d := range []mounter.Device{reader, a.Device} {
		pod, err := s.ForPod(t.Context(), "v", d)
		check(err)
		check(s.DetachReadOnly(t.Context(), "v", []mounter.Device{pod}))
		if id, ok, err := s.Owns(pod); id != "v" || !ok || err != nil {
			t.Errorf("%+v, which a pod has, belongs to %q, %v, %v", pod, id, ok, err)
		}
		if now, err := mounter.DeviceSize(pod); now != 1<<20 || err != nil {
			t.Errorf("it has %d bytes, %v", now, err)
		}
		check(s.DetachReadOnly(t.Context(), "v", nil))
	}
	check(s.Detach(t.Context(), "v"))
}
