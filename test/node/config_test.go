package node

import (
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

const configHead = "apiVersion: csi.crust.dev/v1alpha1\nkind: NodeConfig\n"

// replace exchanges a file atomically, as configuration files should be.
func replace(t *testing.T, path, text string) {
	t.Helper()
	ok(t, os.WriteFile(path+".new", []byte(text), 0o600))
	ok(t, os.Rename(path+".new", path))
}

// A node's pools are those of the entry that matches its labels. Changes that are safe apply while
// csi-node runs; the rest waits, and all mounts stay.
func TestANodeFollowsItsConfigurationFile(t *testing.T) {
	t.Parallel()
	_, dev := disk(t, size)
	address := freeAddress(t)
	n := testnode.NewStopped(t, "", "--metrics-address", address)
	n.NoPoolFlag = true
	config, labels := filepath.Join(n.Dir, "config.yaml"), filepath.Join(n.Dir, "labels")
	n.Args = append(n.Args, "--config", config, "--node-labels", labels)
	pool := func(name string) string {
		return "{name: " + name + ", path: " + filepath.Join(n.Dir, name) + ", overcommit: 1000, reserve: 1Mi}"
	}
	entries := func(pools string) string {
		return "\nnodes:\n  - {name: nvme, selector: {matchLabels: {example.com/disk: nvme}}, pools: [" + pools + "]}\n" +
			"  - {name: others, selector: {matchExpressions: [{key: example.com/disk, operator: NotIn, values: [nvme]}]}, " +
			"pools: [" + pool("never") + "]}\n"
	}
	replace(t, labels, "example.com/disk=\"nvme\"\nkubernetes.io/hostname=\"node-1\"\n")
	replace(t, config, configHead+entries(pool("fast")))
	n.Begin()
	after := func(words, text string) {
		t.Helper()
		before := len(n.Log())
		replace(t, config, text)
		ok(t, syscall.Kill(n.PID(), syscall.SIGHUP))
		for end := time.Now().Add(time.Minute); !strings.Contains(n.Log()[before:], words); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("no %q in the log", words)
			}
		}
	}
	state := func(usable, restart string) {
		t.Helper()
		metrics := readMetrics(t, address)
		wantMetric(t, metrics, "crust_config_last_reload_successful", usable)
		wantMetric(t, metrics, "crust_config_restart_required", restart)
	}

	made, err := n.Client.Create(ctxOf(t), "pvc-a", size, csiclient.Volume{FSType: "ext4"}, map[string]string{"pool": "fast"}, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
	if _, err := os.Stat(filepath.Join(n.Dir, "never")); err == nil {
		t.Error("a pool of other nodes was made")
	}
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	byHand := static("disk", dev, "ext4")
	refused(t, n.Client.Stage(ctxOf(t), byHand), codes.InvalidArgument, "allowDevices", "--config")
	bundle := filepath.Join(t.TempDir(), "bundle.tar.gz")
	if out, well := crustctl(t, n, "support-bundle", "-o", bundle); !well {
		t.Errorf("no bundle: %s", out)
	}
	_, key, _, _ := volume.ParseID(v.ID)
	if parts, names := unpack(t, bundle); !strings.Contains(parts["records/pool-fast/volumes/"+key+".json"], `"pvc-a"`) {
		t.Errorf("the bundle lacks the records of a pool of the file: %v", names)
	}
	after("read again", configHead+entries(pool("fast"))) // unchanged: SIGHUP alone makes csi-node read it
	state("1", "0")

	after("read again", configHead+"allowDevices: ["+dev+"]\nlogging: {verbosity: 4}"+entries(pool("fast")))
	ok(t, stagePatiently(t, n, byHand))
	ok(t, n.Client.Publish(ctxOf(t), byHand, n.Target("b"), false))
	state("1", "0")

	// The file loses the pool, and the device too.
	after("restart csi-node", configHead+entries(pool("another")))
	state("1", "1")
	refused(t, n.Client.Stage(ctxOf(t), static("second", dev, "ext4")), codes.InvalidArgument, "allowDevices")
	write(t, n.Target("a")+"/f", "kept")
	write(t, n.Target("b")+"/f", "kept")

	after("cannot be used", configHead+"pool: []")
	state("0", "1")
	down(t, n, byHand.ID, n.Target("b"))
	down(t, n, v.ID, n.Target("a"))
	ok(t, n.Client.Delete(ctxOf(t), v.ID))

	// csi-node does not start with a broken file.
	n.Stop()
	n.Launch()
	if err := n.Wait(); err == nil || !strings.Contains(n.Log(), config+": the key pool is not known") {
		t.Errorf("%v:\n%s", err, n.Log())
	}
	replace(t, config, configHead+entries(pool("another")))
	n.Start()
	_, err = n.Client.Create(ctxOf(t), "pvc-b", size, csiclient.Volume{FSType: "ext4"}, map[string]string{"pool": "fast"}, nil)
	refused(t, err, codes.ResourceExhausted, "fast", "another")
	state("1", "0")
}

// csi-node notices a changed file by itself.
func TestAChangedConfigurationFileIsFound(t *testing.T) {
	t.Parallel()
	n := testnode.NewStopped(t, "", "--config", filepath.Join(t.TempDir(), "config.yaml"))
	replace(t, n.Args[1], configHead+"allowDevices: [/dev/a]")
	n.Begin()
	replace(t, n.Args[1], configHead+"allowDevices: [/dev/b]")
	for end := time.Now().Add(time.Minute); !strings.Contains(n.Log(), "allow_devices=[/dev/b]"); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it was not read again")
		}
	}
}

// SIGHUP has csi-node read its configuration file. A csi-node without one goes on: calls are in flight.
func TestConfig_SIGHUPWithoutAFileEndsNothing(t *testing.T) {
	t.Parallel()
	// Under nohup, children ignore the signal as well, unless this process catches it.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP)
	defer signal.Stop(caught)
	n := testnode.New(t, "")
	ok(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	down(t, n, v.ID, target)
}
