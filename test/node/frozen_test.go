package node

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
)

// D11: a disk accepts no write, for ever. Each call to its pool returns an error with the pool's
// name, no call waits behind another, and other pools work.
func TestD11_APoolWhoseDiskHangs(t *testing.T) {
	t.Parallel()
	n, _, _ := onOwnDisk(t)
	address := freeAddress(t)
	n.Args = append(n.Args, "--pool", "other=loop:"+filepath.Join(n.Dir, "other"), "--metrics-address", address)
	n.Begin()
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	doomed := create(t, n, "doomed", csiclient.Volume{FSType: "ext4"})
	snapshot, err := snapshotNow(t, n, v.ID, "s")
	ok(t, err)
	disk := filepath.Dir(n.Pool)
	frozen := false
	thaw := func() {
		if frozen {
			run(t, "fsfreeze", "-u", disk)
			frozen, n.PoolHangs = false, false
		}
	}
	t.Cleanup(thaw)
	threads := func() int {
		t.Helper()
		all, err := os.ReadDir("/proc/" + strconv.Itoa(n.PID()) + "/task")
		ok(t, err)
		return len(all)
	}
	run(t, "fsfreeze", "-f", disk)
	frozen, n.PoolHangs = true, true
	time.Sleep(time.Second) // csi-node trusts an answer for this long
	calls := map[string]func(context.Context) error{
		"CreateVolume": func(ctx context.Context) error {
			_, err := n.Client.Create(ctx, "b", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
			return err
		},
		"CreateVolume of a snapshot": func(ctx context.Context) error {
			_, err := n.Client.Create(ctx, "c", size, csiclient.Volume{FSType: "ext4"}, nil, &csi.VolumeContentSource{
				Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot}}})
			return err
		},
		"DeleteVolume": func(ctx context.Context) error { return n.Client.Delete(ctx, doomed.ID) },
		"CreateSnapshot": func(ctx context.Context) error {
			_, err := n.Client.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "t"})
			return err
		},
		"DeleteSnapshot": func(ctx context.Context) error {
			_, err := n.Client.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
			return err
		},
		"ControllerExpandVolume": func(ctx context.Context) error {
			_, err := n.Client.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
				VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
			return err
		},
	}
	for name, call := range calls {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		refused(t, call(ctx), codes.Unavailable, "pool pool has not answered")
		cancel()
		if t.Failed() {
			t.Fatalf("%s waits for a disk that hangs", name)
		}
	}
	before := threads()
	for range 10 {
		for name, call := range calls {
			err := call(ctxOf(t))
			refused(t, err, codes.Unavailable, "pool pool has not answered since")
			if t.Failed() {
				t.Fatalf("%s, with one that hangs already", name)
			}
		}
	}
	if now := threads(); now > before+20 {
		t.Errorf("%d threads hang, %d did before", now, before)
	}
	if got, _ := crustctl(t, n, "pool", "check"); !strings.Contains(got, "pool pool has not answered since") {
		t.Errorf("pool check:\n%s", got)
	}
	// The kernel still knows its size, but nobody can use it.
	metrics := readMetrics(t, address)
	wantMetric(t, metrics, `crust_pool_size_bytes{pool="pool"}`, "-1")
	if strings.Contains(metrics, `crust_pool_size_bytes{pool="other"} -1`) {
		t.Error("another pool hangs")
	}
	other, err := n.Client.Create(ctxOf(t), "o", size, csiclient.Volume{FSType: "ext4"}, map[string]string{"pool": "other"}, nil)
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), other.GetVolumeId()))
	for _, call := range []func() error{
		func() error { _, err := n.Client.GetCapacity(ctxOf(t), &csi.GetCapacityRequest{}); return err },
		func() error {
			_, err := n.Client.ControllerGetVolume(ctxOf(t), &csi.ControllerGetVolumeRequest{VolumeId: v.ID})
			return err
		},
		func() error {
			_, err := n.Client.GetSnapshot(ctxOf(t), &csi.GetSnapshotRequest{SnapshotId: snapshot})
			return err
		},
	} {
		refused(t, call(), codes.Unavailable, "pool pool has not answered since")
	}

	thaw()
	for begin := time.Now(); strings.Contains(readMetrics(t, address), `{pool="pool"} -1`); time.Sleep(50 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatal("the metrics of a disk that answers again")
		}
	}
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := n.Client.Delete(ctxOf(t), doomed.ID)
		if err == nil {
			break
		}
		if time.Since(begin) > time.Minute {
			t.Fatalf("the disk answers again: %v", err)
		}
	}
	for _, name := range []string{"CreateVolume", "CreateVolume of a snapshot", "CreateSnapshot", "DeleteSnapshot"} {
		ok(t, calls[name](ctxOf(t)))
		ok(t, calls[name](ctxOf(t)))
	}
	list, err := n.Client.ListVolumes(ctxOf(t), &csi.ListVolumesRequest{})
	ok(t, err)
	if len(list.GetEntries()) != 3 {
		t.Errorf("volumes: %v", list)
	}

	// The next call finds work that continued after its caller left.
	ok(t, calls["CreateVolume"](ctxOf(t)))
	run(t, "fsfreeze", "-f", disk)
	frozen, n.PoolHangs = true, true
	late := func(within time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		_, err := n.Client.Create(ctx, "late", size, csiclient.Volume{FSType: "ext4"}, nil, nil)
		return err
	}
	if err := late(2 * time.Second); err == nil {
		t.Error("a volume was made on a disk that hangs")
	}
	thaw()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := late(time.Minute)
		if err == nil {
			break
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.Aborted || time.Since(begin) > time.Minute {
			t.Fatal(err)
		}
	}
	list, err = n.Client.ListVolumes(ctxOf(t), &csi.ListVolumesRequest{})
	ok(t, err)
	if len(list.GetEntries()) != 4 {
		t.Errorf("volumes: %v", list)
	}
	for _, e := range list.GetEntries() {
		ok(t, n.Client.Delete(ctxOf(t), e.GetVolume().GetVolumeId()))
	}
}

// D11: in a cluster the node enlarges a pool's volume, and checks the pool's disk first too.
func TestD11_GrowthOnTheNodeOfAPoolWhoseDiskHangs(t *testing.T) {
	t.Parallel()
	n, _, _ := onOwnDisk(t)
	n.Args = append(n.Args, "--expansion", "node")
	n.Begin()
	v, target := up(t, n, "a", csiclient.Volume{FSType: "xfs"})
	time.Sleep(time.Second) // csi-node trusts an answer for this long
	disk := filepath.Dir(n.Pool)
	run(t, "fsfreeze", "-f", disk)
	n.PoolHangs = true
	frozen := true
	thaw := func() {
		if frozen {
			frozen = false
			run(t, "fsfreeze", "-u", disk)
		}
	}
	t.Cleanup(thaw)
	grow := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := n.Client.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
			VolumeId: v.ID, VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
		return err
	}
	refused(t, grow(), codes.Unavailable, "pool pool has not answered")
	refused(t, grow(), codes.Unavailable, "pool pool has not answered since")
	thaw()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := grow()
		if err == nil {
			break
		}
		if time.Since(begin) > time.Minute {
			t.Fatalf("the disk answers again: %v", err)
		}
	}
	down(t, n, v.ID, target)
}
