package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestAudit_WhoDidWhatIsOnRecord runs a volume's life with a kill -9 in it, and checks the audit
// log: who made, formatted, gave, grew and deleted what.
func TestAudit_WhoDidWhatIsOnRecord(t *testing.T) {
	t.Parallel()
	const secret = "hunter2-do-not-tell"
	n := testnode.New(t, "")
	v := csiclient.Volume{FSType: "ext4", Context: map[string]string{
		"csi.storage.k8s.io/pod.name": "db-0", "csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.uid": "11-22"}}
	made, err := n.Client.CreateVolume(ctxOf(t), &csi.CreateVolumeRequest{
		Name: "a", CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{v.Capability()},
		Parameters: map[string]string{"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pvc/namespace": "shop"},
		Secrets:    map[string]string{"password": secret},
	})
	ok(t, err)
	v.ID = made.GetVolume().GetVolumeId()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	snap, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.ID})
	ok(t, err)
	n.Restart()
	_, err = n.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
	ok(t, err)
	if err := n.Client.Delete(ctxOf(t), v.ID); err == nil {
		t.Fatal("a published volume was deleted")
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshot().GetSnapshotId()})
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), v.ID))

	out, good := crustctl(t, n, "history", "--state-dir", filepath.Join(n.Dir, "state"), "--volume", v.ID, "-o", "json")
	if !good {
		t.Fatalf("crustctl history: %s", out)
	}
	var events []audit.Event
	ok(t, json.Unmarshal([]byte(out), &events))
	var got []string
	for _, e := range events {
		line := string(e.Action) + " " + string(e.Outcome)
		if e.Code != "" {
			line += " " + e.Code
		}
		got = append(got, line)
		if e.UID == nil || *e.UID != 0 || int(e.PID) != os.Getpid() || e.Method == "" || e.RequestID == 0 {
			t.Errorf("%s: the caller is %+v; want this process", line, e.Caller)
		}
		if e.Volume != v.ID {
			t.Errorf("%s: volume %q", line, e.Volume)
		}
		switch e.Action {
		case audit.Created:
			if e.Claim != "shop/data" || e.Name != "a" || e.Bytes != size {
				t.Errorf("created: %+v", e)
			}
		case audit.Formatted:
			if e.FSType != "ext4" || !strings.HasPrefix(e.Device, "/dev/") {
				t.Errorf("formatted: %+v", e)
			}
		case audit.Given:
			if e.Pod != "shop/db-0" || e.PodUID != "11-22" || e.Target != n.Target("a") {
				t.Errorf("given: %+v", e)
			}
		}
	}
	want := `created done
formatted begun
formatted done
staged done
given done
snapshot-created done
grown done
taken done
unstaged done
snapshot-deleted begun
snapshot-deleted done
deleted begun
deleted done`
	if have := strings.Join(got, "\n"); have != want {
		t.Errorf("the log says\n%s\nwant\n%s", have, want)
	}
	if run(t, "sh", "-c", "grep -l "+secret+" "+n.Dir+"/state/audit* || true") != "" {
		t.Error("the secret is in the audit log")
	}
}
