package crust

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
)

// Another driver that defers volumes through its own agent cannot name a device of this driver: the
// kubelet's files say whose volume is at a target.
func TestALow_AnotherDriverCannotNameThisDriversDevices(t *testing.T) {
	s := newServer(t, "namespace", "", "--allow-device", "csi.crust.dev=/dev/loop*")
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	s.namespace(p)
	data := filepath.Join(filepath.Dir(p.target), "vol_data.json")
	refused(t, s.runtimePublish(p), codes.InvalidArgument, p.info.Source, "csi.crust.dev", "cannot be told")
	for _, content := range []string{`{"driverName":"other.example","volumeHandle":"x"}`, `{}`, `{"driverName":"csi.crust.dev.evil"}`} {
		ok(t, os.WriteFile(data, []byte(content), 0o600))
		refused(t, s.runtimePublish(p), codes.InvalidArgument, p.info.Source, "is for volumes of csi.crust.dev")
	}
	// A link out of the kubelet's directory is not followed.
	elsewhere := filepath.Join(t.TempDir(), "vol_data.json")
	ok(t, os.WriteFile(elsewhere, []byte(`{"driverName":"csi.crust.dev"}`), 0o600))
	ok(t, os.Remove(data))
	ok(t, os.Symlink(elsewhere, data))
	refused(t, s.runtimePublish(p), codes.InvalidArgument, "cannot be told")
	ok(t, os.Remove(data))
	ok(t, os.WriteFile(data, []byte(`{"driverName":"csi.crust.dev","volumeHandle":"pool.v1"}`), 0o600))
	ok(t, s.runtimePublish(p))
	ok(t, os.Remove(data))
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
}
