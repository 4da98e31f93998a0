package orchestrator

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A record of a later version is kept; one of an earlier boot is removed.
func TestRecordsOfOthers(t *testing.T) {
	dir := t.TempDir()
	r, err := LoadRecords(dir, "one")
	ok(t, err)
	ok(t, r.Put(Deferral{Target: target, Pod: PodKey{"ns", "p", "u1"}}))
	if r, err = LoadRecords(dir, "two"); err != nil || len(r.Of("u1")) != 0 {
		t.Errorf("%v", err)
	}
	later := deferralType
	later.Version++
	ok(t, later.Write(filepath.Join(dir, "x.json"), Deferral{Target: target, BootID: "two"}))
	if _, err = LoadRecords(dir, "two"); err == nil {
		t.Error("a record of a later version was passed over")
	}
}

// A torn record affects one volume only.
func TestA10_ABadRecordIsOneVolumesAlone(t *testing.T) {
	r := deferredRig(t)
	files, err := filepath.Glob(filepath.Join(r.records, "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	ok(t, os.WriteFile(files[0], nil, 0o600))
	records, err := LoadRecords(r.records, "boot")
	ok(t, err)
	r.agent.Records = records
	_, err = r.kubelet.NodePublishVolume(r.ctx(), request())
	// A kubelet that asks again takes other codes for "it is not published", and never unpublishes.
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), files[0]) {
		t.Errorf("published: %v", err)
	}
	// No container gets the placeholder.
	sources := []string{"/etc/hosts", target}
	bound := "/var/lib/kubelet/pods/u1/volume-subpaths/pv-1/c/0"
	for _, sources := range [][]string{sources, {bound}} {
		got, err := r.agent.MountSources(Sandbox{ID: "s1", PodUID: "u1"}, sources)
		if err == nil || !strings.Contains(err.Error(), files[0]) {
			t.Errorf("a container gets %q, %v", got, err)
		}
	}
	if got, err := r.agent.MountSources(Sandbox{ID: "s1", PodUID: "u1"}, sources[:1]); err != nil || len(got) != 1 {
		t.Errorf("a container without the volume: %q, %v", got, err)
	}
	if b, err := os.ReadFile(files[0]); err != nil || len(b) > 0 {
		t.Errorf("the record was touched: %q %v", b, err)
	}
	ok(t, records.Put(Deferral{Target: "/other", Pod: PodKey{"ns", "p", "u2"}}))
	_, err = r.kubelet.NodeUnpublishVolume(r.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
	ok(t, err)
	if r.driver.deferred[target] {
		t.Error("still deferred")
	}
	if _, err := os.Stat(files[0] + ".bad"); err != nil {
		t.Errorf("kept: %v", err)
	}
	_, err = r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
}

// BenchmarkC22 compares a call through the agent with a direct one.
func BenchmarkC22_CallThroughTheAgent(b *testing.B) {
	r := newRig(b)
	direct := csi.NewNodeClient(r.agent.Driver)
	for name, c := range map[string]csi.NodeClient{"direct": direct, "agent": r.kubelet} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := c.NodeGetCapabilities(context.Background(), &csi.NodeGetCapabilitiesRequest{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A published volume's record has no trace, whoever writes it and whenever it was read: version
// 0.1.0 cannot read one that has.
func TestTraces_APublishedRecordHasNone(t *testing.T) {
	r, err := LoadRecords(t.TempDir(), "boot")
	ok(t, err)
	d := Deferral{Target: target, Pod: PodKey{"ns", "p", "u1"}, Trace: "00-1-2-01"}
	ok(t, r.Put(d))
	ok(t, r.Place(target, "sb", true))
	ok(t, r.Put(d))
	if now, _ := r.Get(target); now.Trace != "" || !now.Published {
		t.Errorf("%+v", now)
	}
}
