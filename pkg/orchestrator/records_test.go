package orchestrator

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// A record of a later version is not forgotten; one of an earlier boot is.
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
