// Package monitoring tests the alerts and the dashboard of deploy/monitoring: a real Prometheus
// scrapes running daemons, and the tests cause faults.
package monitoring

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

const size = 64 << 20

// Without SYS_RESOURCE a mounted ext4 does not grow.
const capabilities = "CHOWN,DAC_OVERRIDE,FOWNER,FSETID,MKNOD,SETFCAP,SETGID,SETUID,SYS_ADMIN,SYS_CHROOT,SYS_PTRACE"

// world has two nodes: "one" with pools to damage, crustd and crust-agent, and "two" with volumes
// to damage.
type world struct {
	t             *testing.T
	one, two      *testnode.Node
	metrics       [2]string // addresses
	configs       [2]string // files
	failsOnOne    testnode.Failpoints
	failsOnTwo    testnode.Failpoints
	crustd, agent *daemon
	proxy         *csiclient.Client // of crust-agent
	full, away    string            // the disks of two of one's pools
	targets       []target
	failpoint     sync.Mutex // for calls that must not hit node two's failpoint
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, full: disk(t, "512M"), failsOnOne: testnode.NewFailpoints(t), failsOnTwo: testnode.NewFailpoints(t)}
	w.away = t.TempDir()
	run(t, "mount", "-t", "tmpfs", "-o", "size=64m", "none", w.away)
	t.Cleanup(func() { _ = syscall.Unmount(w.away, syscall.MNT_DETACH) }) // usually the test does it
	for i, n := range []**testnode.Node{&w.one, &w.two} {
		*n = testnode.NewStopped(t, "failpoint")
		w.metrics[i] = freeAddress(t)
		(*n).Args = []string{"--metrics-address", w.metrics[i]}
	}
	w.one.Env, w.two.Env = w.failsOnOne.Env(), w.failsOnTwo.Env()
	w.one.PoolName, w.one.Pool = "full", filepath.Join(w.full, "pool")
	promises := disk(t, "512M")
	for name, at := range map[string]string{"away": w.away, "promises": promises} {
		w.one.Args = append(w.one.Args, "--pool", name+"=loop:"+filepath.Join(at, "pool"))
	}
	w.two.Pool = filepath.Join(disk(t, "2G"), "pool")
	w.one.PoolOptions, w.two.PoolOptions = "", "" // promise no more than there is
	w.two.Args = append(w.two.Args, "--expansion", "node", "--capabilities", capabilities)
	w.configure(0, "allowDevices: [/dev/none]")
	w.one.Args = append(w.one.Args, "--config", w.configs[0])
	w.two.NoPoolFlag = true // the file has it
	w.configure(1, "pools: [{name: pool, path: "+w.two.Pool+"}]\nlogging: {verbosity: 4}")
	w.two.Args = append(w.two.Args, "--config", w.configs[1])
	w.one.Begin()
	w.two.Begin()
	var socket, endpoint string
	w.crustd, socket = newCrustd(t, w.one)
	w.agent, endpoint = newAgent(t, w.one, socket)
	var err error
	w.proxy, err = csiclient.Dial(endpoint, w.one.KubeletDir())
	ok(t, err)
	t.Cleanup(func() { w.proxy.Close() })
	for _, d := range [][3]string{
		{w.metrics[0], "crust-csi-node", "one"}, {w.metrics[1], "crust-csi-node", "two"},
		{w.crustd.metrics, "crustd", "one"}, {w.agent.metrics,
			"crust-agent", "one"},
	} {
		w.targets = append(w.targets, target{[]string{d[0]}, map[string]string{"job": d[1], "node": d[2]}})
	}
	return w
}

// configure writes a node's configuration file.
func (w *world) configure(node int, content string) {
	w.t.Helper()
	if w.configs[node] == "" {
		w.configs[node] = filepath.Join(w.t.TempDir(), "config.yaml")
	}
	ok(w.t, os.WriteFile(w.configs[node], []byte("apiVersion: csi.crust.dev/v1alpha1\nkind: NodeConfig\n"+content+"\n"), 0o600))
}

// up creates, stages and publishes. It takes everything away when the test ends.
func (w *world) up(n *testnode.Node, name string, v csiclient.Volume) (csiclient.Volume, string) {
	w.t.Helper()
	v = w.staged(n, name, v)
	target := n.Target(name)
	w.t.Cleanup(func() {
		if err := n.Client.Unpublish(ctxOf(w.t), v.ID, target); err != nil {
			w.t.Error(err)
		}
	})
	ok(w.t, n.Client.Publish(ctxOf(w.t), v, target, false))
	return v, target
}

func (w *world) staged(n *testnode.Node, name string, v csiclient.Volume) csiclient.Volume {
	w.t.Helper()
	made, err := n.Client.Create(ctxOf(w.t), name, size, v, nil, nil)
	ok(w.t, err)
	v.ID = made.GetVolumeId()
	w.t.Cleanup(func() {
		if err := n.Client.Unstage(ctxOf(w.t), v.ID); err != nil {
			w.t.Error(err)
		}
		if err := n.Client.Delete(ctxOf(w.t), v.ID); err != nil {
			w.t.Error(err)
		}
	})
	ok(w.t, n.Client.Stage(ctxOf(w.t), v))
	return v
}

func (w *world) expand(v csiclient.Volume, target string, bytes int64) error {
	_, err := w.two.Client.NodeExpandVolume(ctxOf(w.t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target,
		StagingTargetPath: w.two.Client.StagingPath(v.ID), CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}})
	return err
}

// grow expects a growth to be refused.
func (w *world) grow(v csiclient.Volume, target string, bytes int64) {
	w.t.Helper()
	if err := w.expand(v, target, bytes); err == nil {
		w.t.Errorf("volume %s grew to %d bytes", v.ID, bytes)
	}
}

// ext4Error makes the kernel report an error to a live ext4, as if it had met one.
func ext4Error(t *testing.T, target string) {
	t.Helper()
	device := filepath.Base(run(t, "findmnt", "-nro", "SOURCE", target))
	ok(t, os.WriteFile("/sys/fs/ext4/"+device+"/trigger_fs_error", []byte("crust test"), 0))
}

// fault causes a fault that fires these alerts.
type fault struct {
	alerts []string
	make   func()
}

// TestEveryAlertFires: no alert fires before its fault. After it, /api/v1/alerts of a real
// Prometheus shows it firing, and no other. All times in the rules are 120 times shorter, or less
// on a busy machine.
//
// CrustSELinuxMismatch needs a kernel with SELinux: TestS09_ADroppedLabelFiresItsAlert.
func TestEveryAlertFires(t *testing.T) {
	begin := time.Now()
	w := newWorld(t)
	// The volumes for the faults start healthy.
	degraded, onDegraded := w.up(w.two, "degraded", csiclient.Volume{FSType: "ext4", Group: "4242"})
	_, onFailed := w.up(w.two, "failed", csiclient.Volume{FSType: "ext4", MountFlags: []string{"errors=remount-ro"}})
	smaller, onSmaller := w.up(w.two, "smaller", csiclient.Volume{FSType: "ext4"})
	refused, onRefused := w.up(w.two, "refused", csiclient.Volume{FSType: "ext4"})
	grown := w.staged(w.two, "grown", csiclient.Volume{FSType: "ext4"})
	ok(t, w.expand(grown, w.two.Client.StagingPath(grown.ID), 2*size)) // not mounted, so it can grow
	walked := w.staged(w.two, "walked", csiclient.Volume{FSType: "ext4", Group: "4242"})
	damaged := w.staged(w.two, "damaged", csiclient.Volume{FSType: "ext4"})
	spare := w.staged(w.one, "spare", csiclient.Volume{FSType: "ext4"})

	ok(t, w.two.Client.Publish(ctxOf(t), degraded, w.two.Target("reader"), true))
	t.Cleanup(func() { ok(t, w.two.Client.Unpublish(ctxOf(t), degraded.ID, w.two.Target("reader"))) })
	pace := measured(t, w.targets)
	rules, longest := pace.rules(t)
	t.Logf("the daemons run after %s", since(begin))
	p := newPrometheus(t, pace, rules, w.targets)
	// Longer than any alert waits.
	defer w.use()()
	calm := p.settled(len(w.targets), longest+2*time.Duration(pace))
	if seen := p.seen(); len(seen) > 0 {
		t.Fatalf("before any fault these have fired: %v", seen)
	}
	t.Logf("all was well for long enough after %s", since(begin))

	faults := []fault{
		{[]string{"CrustPoolNearlyFull one full", "CrustPoolFull one full", "CrustPoolNearlyPromised one full"},
			func() { fill(t, w.full) }},
		{[]string{"CrustPoolNearlyPromised one promises"}, func() { w.promise("promises") }},
		{[]string{"CrustPoolAway one away"}, func() { run(t, "umount", "-l", w.away) }},
		{[]string{"CrustNoRoom one CreateVolume"}, func() {
			if _, err := w.one.Client.Create(ctxOf(t), "huge", 1<<50, csiclient.Volume{FSType: "ext4"},
				map[string]string{"pool": "promises"},
				nil); err == nil {
				t.Error("a volume of 1 PiB was made")
			}
		}},
		{nil, w.askElsewhere}, // no fault: CrustNoRoom does not fire on node two
		{[]string{"CrustVolumeDegraded two FilesystemError"}, func() { ext4Error(t, onDegraded) }},
		{[]string{"CrustVolumeFailed two RemountedReadOnly"}, func() { ext4Error(t, onFailed) }},
		{[]string{"CrustGrowthWaits two file_system"}, func() { w.grow(smaller, onSmaller, 2*size) }},
		{[]string{"CrustGrowthWaits two no_room"}, func() { w.grow(refused, onRefused, 1<<50) }},
		{[]string{"CrustConfigRefused one"}, func() { w.configure(0, "alowDevices: [/dev/none]") }},
		{[]string{"CrustConfigNeedsRestart two"}, func() {
			w.configure(1, "pools: [{name: pool, path: "+w.two.Pool+"}, {name: more, path: "+t.TempDir()+"}]\nlogging: {verbosity: 4}")
		}},
		{[]string{"CrustFilesystemNeedsPerson two"}, func() { w.damage(damaged) }},
		{[]string{"CrustOwnershipWalkSlow two"}, func() { w.hangWalk(walked) }},
		{[]string{"CrustCallsFail one NodeStageVolume"}, func() {
			w.failsOnOne.Set(t, "stage.attached", "error")
			if err := w.one.Client.Stage(ctxOf(t), spare); err == nil {
				t.Error("the stage did not fail")
			}
			w.failsOnOne.Off(t)
		}},
		{[]string{"CrustdAway one", "CrustSandboxVolumeFailed one"}, func() {
			w.crustd.kill()
			w.failSandbox(spare)
		}},
	}
	want := p.after(nil, faults)
	if out := os.Getenv("CRUST_PICTURE"); out != "" {
		p.draw(out, calm)
	}
	w.wantMetrics(p, rules)
	want = p.after(want, []fault{
		{[]string{"CrustAgentAway one"}, w.agent.kill},
		{[]string{"CrustNodeAway one"}, w.one.Kill},
	})
	// Prometheus finds no pod any more.
	want = p.after(want, []fault{{[]string{"CrustNoNodes"}, func() { p.scrape(w.targets[2:3]) }}})
	elsewhere := map[string]bool{"CrustSELinuxMismatch": true}
	for _, a := range rules.Alerts() {
		if fired := contains(want, a.Alert); fired == elsewhere[a.Alert] {
			t.Errorf("%s: fired by its fault: %v", a.Alert, fired)
		}
	}
	w.failsOnTwo.Off(t)
	w.configure(0, "")
	w.one.Start() // its pool stays away, which does not prevent the cleanup
	t.Logf("all alerts have fired after %s", since(begin))
}

// settled waits until all targets have been scraped for that long. Prometheus takes some seconds to
// find them; CrustNoNodes fires correctly until then and does not count.
func (p *prometheus) settled(targets int, long time.Duration) (from time.Time) {
	p.t.Helper()
	up := func(at string) bool { return p.number("count(up"+at+" == 1)") == float64(targets) }
	eventually(p.t, "all targets are found", func() bool {
		p.mu.Lock()
		quiet := p.now == 0
		p.mu.Unlock()
		return up("") && quiet
	})
	p.mu.Lock()
	clear(p.fired)
	p.mu.Unlock()
	from = time.Now()
	since := p.number("vector(time())")
	eventually(p.t, "all targets have been scraped for long enough", func() bool {
		return p.number("vector(time())") > since+long.Seconds() && up(fmt.Sprintf(" offset %dms", long.Milliseconds()))
	})
	return from
}

// after causes faults and waits for their alerts, which must not have fired before. The argument
// before lists the alerts of earlier faults.
func (p *prometheus) after(before []string, faults []fault) (fired []string) {
	p.t.Helper()
	fired = before
	for _, f := range faults {
		for _, alert := range f.alerts {
			if contains(p.seen(), alert) {
				p.t.Errorf("%s fired before its fault", alert)
			}
		}
		fired = append(fired, f.alerts...)
		f.make()
	}
	p.wantFired(fired)
	return fired
}

func contains(list []string, alert string) bool {
	for _, s := range list {
		if s == alert || strings.HasPrefix(s, alert+" ") {
			return true
		}
	}
	return false
}
