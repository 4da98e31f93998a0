package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// exits runs crustctl and expects an exit code and words.
func exits(t testing.TB, n *testnode.Node, code int, args []string, words ...string) string {
	t.Helper()
	args = append([]string{"--endpoint", n.Endpoint(), "--kubelet-dir", n.KubeletDir()}, args...)
	// A command that hangs is killed.
	out, err := exec.CommandContext(ctxOf(t), testnode.BuildCommand(t, "crustctl", ""), args...).CombinedOutput()
	got := 0
	var e *exec.ExitError
	if errors.As(err, &e) {
		got = e.ExitCode()
	} else if err != nil {
		got = -1
	}
	if got != code {
		t.Errorf("crustctl %v ended with %d, want %d:\n%s", args, got, code, out)
	}
	for _, w := range words {
		if !strings.Contains(string(out), w) {
			t.Errorf("crustctl %v has not a word of %q:\n%s", args, w, out)
		}
	}
	return string(out)
}

var ofClaim = map[string]string{"csi.storage.k8s.io/pvc/namespace": "shop", "csi.storage.k8s.io/pvc/name": "orders",
	"csi.storage.k8s.io/pv/name": "pvc-check"}

func TestB08_PoolCheckThroughTheDriver(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	check := []string{"pool", "check"}
	exits(t, n, 0, check, "nothing found in pool")
	made, err := n.Client.Create(ctxOf(t), "pvc-check", size, csiclient.Volume{FSType: "ext4"}, ofClaim, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
	ok(t, n.Client.Stage(ctxOf(t), v))
	exits(t, n, 0, check, "nothing found in pool")

	stray := filepath.Join(n.PoolDir(), "volumes", "v0123456789abcdef0123456789abcdef.img")
	ok(t, os.WriteFile(stray, []byte("somebody's data"), 0o600))
	exits(t, n, 1, check, "file-without-record", stray, "1 finding")
	exits(t, n, 0, append(check, "--ignore", "file-without-record"))
	ok(t, os.Remove(stray))

	ok(t, os.Truncate(image(n, v.ID), size/2))
	exits(t, n, 1, check, "file-too-short", "shop/orders")
	var out checked
	ok(t, json.Unmarshal([]byte(strings.TrimSuffix(exits(t, n, 1, append(check, "-o", "json")), "crustctl: 1 finding\n")), &out))
	if len(out.Findings) != 1 || out.Findings[0].Kind != "file-too-short" || out.Findings[0].ID != v.ID ||
		out.Findings[0].Claim != "shop/orders" {
		t.Errorf("%+v", out)
	}
	ok(t, os.Truncate(image(n, v.ID), size))

	// Somebody detaches the device of a staged volume.
	device := strings.TrimSpace(run(t, "losetup", "-n", "-O", "NAME", "-j", image(n, v.ID)))
	run(t, "losetup", "-d", device)
	exits(t, n, 1, check, "staged-without-device", "shop/orders", device)
	down(t, n, v.ID)
	exits(t, n, 0, check)
	exits(t, n, 2, append(check, "none"), "none")
	exits(t, n, 2, append(check, "--persistent-volumes", "/nonexistent"), "--persistent-volumes")
}

type checked struct {
	Pools    []string
	Findings []struct{ Pool, Kind, ID, Claim, Path, Means, Do string }
}

// B8: csi-node's running work is no finding. What a crash left of it is one.
func TestB08_PoolCheckLeavesOutWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	at := testnode.NewFailpoints(t)
	n := testnode.NewStopped(t, "failpoint")
	n.Env = at.Env()
	n.Begin()
	hung, ended := at.Hang(t, "create.recorded", func() error {
		_, err := n.Client.Create(ctxOf(t), "pvc-way", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
		return err
	})
	if !hung {
		t.Fatal("the volume was made")
	}
	exits(t, n, 0, []string{"pool", "check"}, "nothing found")
	exits(t, n, 1, []string{"pool", "check", "pool", "--dir", n.PoolDir()}, "unfinished")
	n.Kill()
	<-ended
	exits(t, n, 2, []string{"pool", "check"}, "--dir")
	exits(t, n, 1, []string{"pool", "check", "pool", "--dir", n.PoolDir()}, "unfinished", "restart the driver")
	exits(t, n, 2, []string{"pool", "check", "--dir", n.PoolDir()}, "say which pool")
	exits(t, n, 2, []string{"pool", "check", "pool", "--dir", n.KubeletDir()}, "no directory of a pool")
	at.Off(t)
	n.Start()
	exits(t, n, 0, []string{"pool", "check"}, "nothing found")
}

// pvs writes the output of `kubectl get pv -o json`.
func pvs(t *testing.T, items ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pv.json")
	ok(t, os.WriteFile(path, []byte(`{"apiVersion": "v1", "kind": "List", "items": [`+strings.Join(items, ",")+`]}`), 0o600))
	return path
}

func pv(name, handle, node string) string {
	return fmt.Sprintf(`{"metadata": {"name": %q}, "spec": {"claimRef": {"namespace": "shop", "name": %q}, "csi": {"driver": "csi.crust.dev", "volumeHandle": %q},
		"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "topology.csi.crust.dev/node", "operator": "In", "values": [%q]}]}]}}}}`, name, "of-"+name, handle, node)
}

func TestB08_PoolCheckComparesWithPersistentVolumes(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "pvc-here", csiclient.Volume{FSType: "ext4"})
	lost := "pool.v" + strings.Repeat("0", 32)
	compare := func(items ...string) []string {
		return []string{"pool", "check", "--persistent-volumes", pvs(t, items...)}
	}
	local := `{"metadata": {"name": "local"}, "spec": {"local": {"path": "/mnt"}}}`
	exits(t, n, 0, compare(pv("pvc-here", v.ID, "node-1"), pv("pvc-there", lost, "node-2"), local))
	out := exits(t, n, 1, compare(pv("pvc-here", v.ID, "node-1"), pv("pvc-lost", lost, "node-1")), "pv-without-volume", "shop/of-pvc-lost")
	if strings.Contains(out, "pvc-here") {
		t.Errorf("a volume that is there:\n%s", out)
	}
	elsewhere := pv("pvc-there", lost, "node-2")
	exits(t, n, 1, compare(elsewhere), "volume-without-pv", "pvc-here")
	// A list without any volume of the driver says nothing about the volumes here.
	for _, none := range [][]string{{local}, {}} {
		if out := exits(t, n, 2, compare(none...), "no PersistentVolume of this driver", "volumes (1)"); strings.Contains(out,
			"volume-without-pv") {
			t.Errorf("a volume is nobody's for a list that cannot know it:\n%s", out)
		}
	}
	exits(t, n, 1, compare(pv("pvc-here", v.ID, "old")), "pv-of-another-node", "shop/of-pvc-here", "node node-1", "another name")
	exits(t, n, 1, compare(pv("pvc-here", v.ID, "node-1"), pv("pvc-lost", "other.v"+strings.Repeat("0", 32), "node-1")),
		"pv-without-volume", `no pool "other"`)
	// A volume whose pool got another name is not one that nobody has.
	renamed := "old" + strings.TrimPrefix(v.ID, "pool")
	out = exits(t, n, 1, compare(pv("pvc-here", renamed, "node-1")), "pv-of-another-pool", "shop/of-pvc-here", "names pool old", v.ID)
	if strings.Contains(out, "volume delete") || strings.Contains(out, "pv-without-volume") {
		t.Errorf("a pool that was renamed:\n%s", out)
	}
	exits(t, n, 1, compare(pv("pvc-here", v.ID, "node-1"), pv("other", renamed, "node-1")), "pv-without-volume", `no pool "old"`)
	// A variable that is not set compares nothing, and does not seem to.
	exits(t, n, 2, []string{"pool", "check", "--persistent-volumes", ""}, "--persistent-volumes is empty")
	exits(t, n, 1, []string{"volume", "create", "restored", "--from-snapshot", ""}, "--from-snapshot is empty")
	if all, err := n.Client.Volumes(ctxOf(t)); err != nil || len(all) != 1 {
		t.Errorf("a restore of no snapshot made a volume: %v, %v", all, err)
	}
	n.Kill()
	dir := []string{"pool", "check", "pool", "--dir", n.PoolDir(), "--persistent-volumes", pvs(t, pv("pvc-lost", lost, "node-1"))}
	exits(t, n, 2, dir, "--node-id")
	exits(t, n, 1, append(dir, "--node-id", "node-1"), "pv-without-volume", "volume-without-pv")
	n.Start()
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}
