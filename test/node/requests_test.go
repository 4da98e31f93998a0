package node

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func capability(fs string, mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return csiclient.Volume{FSType: fs, Mode: mode, MountFlags: flags}.Capability()
}

// B2: GetCapacity reports room for a StorageClass that CreateVolume refuses, because the refusal
// reaches the claim's events only once a node is chosen. For an unknown pool it reports none.
func TestB02_AMistypedClassIsToldByCreateVolume(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	room := func(parameters map[string]string, c *csi.VolumeCapability) int64 {
		t.Helper()
		r, err := n.Client.GetCapacity(ctxOf(t),
			&csi.GetCapacityRequest{Parameters: parameters, VolumeCapabilities: []*csi.VolumeCapability{c}})
		ok(t, err)
		return r.GetAvailableCapacity()
	}
	for _, wrong := range []struct {
		parameters map[string]string
		fstype     string
		words      string
	}{
		{map[string]string{"provisionning": "thick"}, "ext4", "provisionning"},
		{map[string]string{"provisioning": "thicc"}, "ext4", "thicc"},
		{map[string]string{"fsGroupStrategy": "chgrp", "pool": "pool"}, "ext4", "chgrp"},
		{map[string]string{"pool": "Pool"}, "ext4", "Pool"}, // no node can have it
		{map[string]string{"pool": "pool/", "provisioning": "thicc"}, "ext4", "thicc"},
		{nil, "zfs", "zfs"},
	} {
		c := capability(wrong.fstype, 0)
		if got := room(wrong.parameters, c); got < 1<<20 {
			t.Errorf("%v, %s: there is room for %d bytes", wrong.parameters, wrong.fstype, got)
		}
		_, err := n.Client.CreateVolume(ctxOf(t),
			&csi.CreateVolumeRequest{Name: "x", Parameters: wrong.parameters, VolumeCapabilities: []*csi.VolumeCapability{c}})
		refused(t, err, codes.InvalidArgument, wrong.words)
	}
	for range 3 {
		if got := room(map[string]string{"pool": "nowhere"}, capability("ext4", 0)); got != 0 {
			t.Errorf("a pool that is not here has room for %d bytes", got)
		}
	}
	if said := strings.Count(n.Log(), "wants a pool that this node does not have"); said != 1 {
		t.Errorf("the log says %d times that the pool is not here", said)
	}
}

// TestBadCreate: every malformed create request gets the CSI specification's code, names the error,
// and leaves nothing.
func TestBadCreate(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	good := func() *csi.CreateVolumeRequest {
		return &csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: []*csi.VolumeCapability{capability("ext4", 0)}}
	}
	gib := int64(1 << 30)
	for name, c := range map[string]struct {
		change func(*csi.CreateVolumeRequest)
		code   codes.Code
		words  string
	}{
		"no name":            {func(r *csi.CreateVolumeRequest) { r.Name = "" }, codes.InvalidArgument, "name"},
		"long name":          {func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("x", 129) }, codes.InvalidArgument, "128"},
		"control characters": {func(r *csi.CreateVolumeRequest) { r.Name = "a\nb" }, codes.InvalidArgument, "control"},
		"no capabilities": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil }, codes.InvalidArgument,
			"volume_capabilities"},
		"no access type": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessType = nil }, codes.InvalidArgument,
			"neither mount nor block"},
		"no access mode": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode = nil },
			codes.InvalidArgument, "access_mode"},
		"many nodes": {func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0] = capability("ext4", csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
		}, codes.InvalidArgument, "one node"},
		"unknown file system": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = capability("zfs", 0) },
			codes.InvalidArgument, "zfs"},
		"block and mount": {func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities, csiclient.Volume{Block: true}.Capability())
		}, codes.InvalidArgument, "both"},
		"bind option": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = capability("ext4", 0, "bind") },
			codes.InvalidArgument, "bind"},
		"ro and rw": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = capability("ext4", 0, "ro,rw") },
			codes.InvalidArgument, "contradict"},
		"mount group": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].GetMount().VolumeMountGroup = "staff" },
			codes.InvalidArgument, "staff"},
		"unknown parameter": {func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"provisionning": "thick"} },
			codes.InvalidArgument, "provisionning"},
		"unknown value": {func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"provisioning": "thicc"} },
			codes.InvalidArgument, "thicc"},
		// Another node may have it: see "a snapshot of another node".
		"a pool of another node": {func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"pool": "nowhere"}
		}, codes.ResourceExhausted, `"nowhere" is not on this node`},
		"no pool's name": {func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"pool": "No Where"}
		}, codes.InvalidArgument, "No Where"},
		"mutable parameters": {func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"iops": "1"} },
			codes.InvalidArgument, "iops"},
		"negative size": {func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: -1} },
			codes.InvalidArgument, "negative"},
		"limit below required": {func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 2 * gib, LimitBytes: gib}
		}, codes.InvalidArgument, "larger"},
		"too large": {func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: 1 << 62} },
			codes.OutOfRange, "more than"},
		"beyond the pool": {func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: 1 << 59} },
			codes.ResourceExhausted, "left to promise"},
		"too small for xfs": {func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0] = capability("xfs", 0)
			r.CapacityRange = &csi.CapacityRange{LimitBytes: 16 << 20}
		}, codes.OutOfRange, "file system needs"},
		"another node": {func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{
				Requisite: []*csi.Topology{{Segments: map[string]string{"topology.csi.crust.dev/node": "other"}}}}
		}, codes.ResourceExhausted, "elsewhere"},
		"no such snapshot": {func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
				Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: "pool.s0123456789abcdef0123456789abcdef"}}}
		}, codes.NotFound, "pool.s0123456789abcdef0123456789abcdef"},
		// external-provisioner leaves the claim to another node only for this code (11.2).
		"a snapshot of another node": {func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{
				Requisite: []*csi.Topology{{Segments: map[string]string{"topology.csi.crust.dev/node": "node-1"}}}}
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
				Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: "pool.s0123456789abcdef0123456789abcdef"}}}
		}, codes.ResourceExhausted, "on the node that has its origin, and node-1 has not"},
		"a clone of another node's": {func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{
				Requisite: []*csi.Topology{{Segments: map[string]string{"topology.csi.crust.dev/node": "node-1"}}}}
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
				Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "pool.v0123456789abcdef0123456789abcdef"}}}
		}, codes.ResourceExhausted, "on the node that has its origin"},
	} {
		t.Run(name, func(t *testing.T) {
			r := good()
			c.change(r)
			_, err := n.Client.CreateVolume(ctxOf(t), r)
			refused(t, err, c.code, c.words)
		})
	}
	checkNothingLeft(t, n)
}

func TestBadNodeCalls(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false), codes.FailedPrecondition, "not staged")
	wrong := v
	wrong.FSType = "xfs"
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Stage(ctxOf(t), v))
	refused(t, n.Client.Stage(ctxOf(t), wrong), codes.FailedPrecondition, "holds ext4, and xfs was asked for")
	asBlock := v
	asBlock.Block = true
	refused(t, n.Client.Stage(ctxOf(t), asBlock), codes.AlreadyExists, "block volume")
	refused(t, n.Client.Publish(ctxOf(t), asBlock, n.Target("a"), false), codes.FailedPrecondition)
	unknown := v
	unknown.ID = "pool.v0123456789abcdef0123456789abcdef"
	refused(t, n.Client.Stage(ctxOf(t), unknown), codes.NotFound, unknown.ID)
	ok(t, n.Client.Unpublish(ctxOf(t), unknown.ID, n.Target("nothing")))
	odd := v
	odd.Context = map[string]string{"devcie": "/dev/sda"}
	refused(t, n.Client.Stage(ctxOf(t), odd), codes.InvalidArgument, "devcie")
	odd.Context = map[string]string{"device": "/dev/null"}
	refused(t, n.Client.Stage(ctxOf(t), odd), codes.InvalidArgument)
	_, err := n.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{LimitBytes: 1 << 20}})
	refused(t, err, codes.OutOfRange, "shrink")
	_, err = n.Client.NodeExpandVolume(ctxOf(t), &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: n.Client.StagingPath(v.ID),
		CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 40}})
	refused(t, err, codes.OutOfRange)
	// The device vanishes without the driver.
	run(t, "sh", "-c", "losetup -d $(losetup -n -O NAME -j '"+image(n, v.ID)+"')")
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false), codes.FailedPrecondition, "device is gone")
	if h := health(t, n, v.ID, ""); !strings.Contains(h, "DeviceGone") {
		t.Errorf("health: %q", h)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	down(t, n, v.ID, n.Target("a"))
}

func TestStaticDevice(t *testing.T) {
	t.Parallel()
	disk := filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(disk, nil, 0o600))
	ok(t, os.Truncate(disk, size))
	dev := strings.TrimSpace(run(t, "losetup", "-f", "--show", disk))
	t.Cleanup(func() { run(t, "losetup", "-d", dev) })
	n := testnode.New(t, "", "--allow-device", dev)
	v := csiclient.Volume{ID: "my-disk", FSType: "xfs", Context: map[string]string{"device": dev}}
	forbidden := v
	forbidden.ID, forbidden.Context = "other", map[string]string{"device": "/dev/vda"}
	refused(t, n.Client.Stage(ctxOf(t), forbidden), codes.InvalidArgument, "--allow-device")
	none := testnode.New(t, "")
	refused(t, none.Client.Stage(ctxOf(t), forbidden), codes.InvalidArgument, "(none)", "allow it with --allow-device")
	ok(t, n.Client.Stage(ctxOf(t), v))
	second := v
	second.ID = "the-same-disk"
	refused(t, n.Client.Stage(ctxOf(t), second), codes.FailedPrecondition, "staged as volume my-disk")
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	write(t, n.Target("a")+"/f", "kept")
	n.Restart()
	ok(t, n.Client.Delete(ctxOf(t), v.ID)) // the driver may not destroy it: nothing happens
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	// The file grew without the driver: grown before a pod sees it.
	ok(t, os.Truncate(disk, 2*size))
	run(t, "losetup", "-c", dev)
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	s, err := n.Client.NodeGetVolumeStats(ctxOf(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: n.Target("a")})
	ok(t, err)
	if s.GetUsage()[0].GetTotal() < size*3/2 || read(t, n.Target("a")+"/f") != "kept" {
		t.Errorf("not grown, or not kept: %v", s)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

func TestExpandedWhileUnpublishedIsGrownFirst(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for _, fs := range filesystems {
		v := create(t, n, fs, csiclient.Volume{FSType: fs})
		ok(t, n.Client.Stage(ctxOf(t), v))
		_, err := n.Client.ControllerExpandVolume(ctxOf(t),
			&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
		ok(t, err)
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(fs), true))
		s, err := n.Client.NodeGetVolumeStats(ctxOf(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: n.Target(fs)})
		ok(t, err)
		if total := s.GetUsage()[0].GetTotal(); total < size*3/2 {
			t.Errorf("%s has %d bytes", fs, total)
		}
		down(t, n, v.ID, n.Target(fs))
	}
}

func TestSocketTakeoverAndTermination(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	second := exec.CommandContext(ctxOf(t), testnode.Build(t, ""), "--endpoint", n.Endpoint(), "--pool", "p=loop:"+t.TempDir(),
		"--state-dir", t.TempDir(), "--kubelet-dir", n.KubeletDir())
	if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), "another server answers") {
		t.Errorf("a live socket was taken over: %v %s", err, out)
	}
	samePool := exec.CommandContext(ctxOf(t), testnode.Build(t, ""), "--endpoint", "unix://"+t.TempDir()+"/s",
		"--pool", "p=loop:"+n.PoolDir(), "--state-dir", t.TempDir(), "--kubelet-dir", n.KubeletDir())
	if out, err := samePool.CombinedOutput(); err == nil || !strings.Contains(string(out), "another process has") {
		t.Errorf("a pool was opened twice: %v %s", err, out)
	}
	n.Restart() // kill -9 leaves the socket; the next start takes it over
}

func TestSIGTERMFinishesACallInFlight(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "failpoint")
	n.Env = []string{"CRUST_FAILPOINT_PAUSE=stage.attached"}
	n.Restart()
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	done := make(chan error, 1)
	go func() { done <- n.Client.Stage(context.Background(), v) }()
	for run(t, "losetup", "-j", image(n, v.ID)) == "" { // it is running, and paused
		time.Sleep(time.Millisecond)
	}
	ok(t, syscall.Kill(n.PID(), syscall.SIGTERM))
	ok(t, <-done)
	ok(t, n.Wait())
	n.Env = nil
	n.Start()
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	down(t, n, v.ID, n.Target("a"))
}

func TestMetricsAndHealthEndpoints(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	address := l.Addr().String()
	ok(t, l.Close())
	n := testnode.New(t, "", "--metrics-address", address)
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	get := func(path string) (int, string) {
		r, err := http.Get("http://" + address + path)
		ok(t, err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		ok(t, err)
		return r.StatusCode, string(b)
	}
	_, m := get("/metrics")
	for _, want := range []string{
		`crust_csi_request_duration_seconds_count\{code="OK",method="NodePublishVolume"\} 1`,
		`crust_pool_available_bytes\{pool="pool"\} [1-9]`, `crust_filesystems_made_total\{fs_type="ext4"\} 1`,
		`crust_csi_requests_in_flight\{method="NodePublishVolume"\} 0`,
	} {
		if !regexp.MustCompile(want).MatchString(m) {
			t.Errorf("no %s in the metrics", want)
		}
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := get(path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	// Probe fails if another directory replaces the pool's.
	ok(t, os.Rename(filepath.Join(n.PoolDir(), "lock"), filepath.Join(n.Dir, "lock")))
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "pool") {
		t.Errorf("readyz: %d %s", code, body)
	}
	_, err = n.Client.Probe(ctxOf(t), &csi.ProbeRequest{})
	refused(t, err, codes.FailedPrecondition, "pool")
	ok(t, os.Rename(filepath.Join(n.Dir, "lock"), filepath.Join(n.PoolDir(), "lock")))
	down(t, n, v.ID, target)
}
