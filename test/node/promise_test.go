package node

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// left returns the result of GetCapacity.
func left(t *testing.T, n *testnode.Node, parameters map[string]string) int64 {
	t.Helper()
	r, err := n.Client.GetCapacity(ctxOf(t), &csi.GetCapacityRequest{Parameters: parameters})
	ok(t, err)
	return r.GetAvailableCapacity()
}

// A05: promises fit. Claims, growth, copies and snapshots beyond the pool are refused, and
// GetCapacity reports the rest beforehand.
func TestA05_WhatIsPromisedFits(t *testing.T) {
	t.Parallel()
	for _, pool := range []string{"ext4", "xfs"} {
		t.Run("pool on "+pool, func(t *testing.T) {
			n := newOnSmallPool(t, pool)
			raw := csiclient.Volume{Block: true}
			words := []string{"pool", "promised", "overcommit=1", "bytes"}
			_, err := n.Client.Create(ctxOf(t), "huge", 15<<40, raw, nil, nil)
			refused(t, err, codes.ResourceExhausted, append(words, itoa(15<<40))...)
			first := left(t, n, nil)
			if first < 700<<20 || first > 1<<30 {
				t.Errorf("a pool of 1 GiB has %d to promise", first)
			}
			made, err := n.Client.Create(ctxOf(t), "a", 512<<20, raw, nil, nil)
			ok(t, err)
			v := csiclient.Volume{ID: made.GetVolumeId(), Block: true}
			if got := left(t, n, nil); got > first-512<<20+first/100 { // reported to 1 %
				t.Errorf("%d were left, 512 MiB were promised, and %d are left", first, got)
			}
			rest := left(t, n, nil)
			for _, provisioning := range []string{"thin", "thick"} {
				_, err = n.Client.Create(ctxOf(t), "b", rest+2<<20, raw, map[string]string{"provisioning": provisioning}, nil)
				refused(t, err, codes.ResourceExhausted, words...)
			}
			// B5: nor by growth.
			_, err = expand(t, n, v.ID, 512<<20+rest+2<<20)
			refused(t, err, codes.ResourceExhausted, words...)
			if got := fileSize(t, image(n, v.ID)); got != 512<<20 {
				t.Errorf("a refused growth left %d bytes", got)
			}
			// A clone or a restored snapshot is a separate volume.
			patch(t, image(n, v.ID), 0, []byte(strings.Repeat("data", 16<<20)))
			sid, err := snapshotNow(t, n, v.ID, "s")
			ok(t, err)
			for name, source := range map[string]*csi.VolumeContentSource{"clone": cloneOf(v.ID), "restored": snapshotOf(sid)} {
				_, err = n.Client.Create(ctxOf(t), name, 0, raw, nil, source)
				refused(t, err, codes.ResourceExhausted, words...)
			}
			if got := left(t, n, nil); got > rest-60<<20 {
				t.Errorf("a snapshot of 64 MiB was taken: %d were left, then %d", rest, got)
			}
			// All of the rest can be promised, and then nothing.
			most := left(t, n, nil) &^ (1<<20 - 1)
			made, err = n.Client.Create(ctxOf(t), "last", most, raw, nil, nil)
			ok(t, err)
			_, err = n.Client.Create(ctxOf(t), "one more", 16<<20, raw, nil, nil)
			refused(t, err, codes.ResourceExhausted, words...)
			// The promise holds: everything can be written.
			for _, id := range []string{v.ID, made.GetVolumeId()} {
				w := csiclient.Volume{ID: id, Block: true}
				ok(t, n.Client.Stage(ctxOf(t), w))
				ok(t, n.Client.Publish(ctxOf(t), w, n.Target(id), false))
				run(t, "dd", "if=/dev/zero", "of="+n.Target(id), "bs=1M", "count="+itoa(int(capacityOf(t, n, id)>>20)), "oflag=direct")
				ok(t, n.Client.Unpublish(ctxOf(t), id, n.Target(id)))
				ok(t, n.Client.Unstage(ctxOf(t), id))
			}
			// Deleting gives the promise back.
			ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
			// xfs frees removed files in the background.
			for deadline := time.Now().Add(time.Minute); left(t, n, nil) < most-8<<20; time.Sleep(100 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("%d were promised and taken back, and %d are left", most, left(t, n, nil))
				}
			}
			_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
			ok(t, err)
			ok(t, n.Client.Delete(ctxOf(t), v.ID))
		})
	}
}

// B5: overcommit promises more. After an upgrade to less, existing volumes work as before, and only
// new promises are refused.
func TestB05_OvercommitIsPerPool(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	address := l.Addr().String()
	ok(t, l.Close())
	n := stoppedOnPool(t, "ext4", "", 512<<20, "--metrics-address", address)
	n.PoolOptions = ",overcommit=3,reserve=8Mi"
	n.Begin()
	v := csiclient.Volume{FSType: "ext4"}
	var ids []string
	for i := range 3 {
		made, err := n.Client.Create(ctxOf(t), "v"+itoa(i), 400<<20, v, nil, nil)
		ok(t, err)
		ids = append(ids, made.GetVolumeId())
	}
	_, err = n.Client.Create(ctxOf(t), "v3", 400<<20, v, nil, nil)
	refused(t, err, codes.ResourceExhausted, "overcommit=3", itoa(1200<<20))
	if thick := left(t, n, map[string]string{"provisioning": "thick"}); thick > 512<<20 {
		t.Errorf("a thick volume of %d would fit into a pool of 512 MiB", thick)
	}
	metrics := scrape(t, address)
	for _, want := range []string{
		fmt.Sprintf(`crust_pool_promised_bytes{pool="pool"} %g`, float64(1200<<20)),
		fmt.Sprintf(`crust_pool_reserve_bytes{pool="pool"} %g`, float64(8<<20)),
		`crust_pool_used_bytes{pool="pool"} `, `crust_pool_left_bytes{pool="pool"} `,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("the metrics lack %s:\n%s", want,
				strings.Join(regexp.MustCompile("(?m)^crust_pool.*$").FindAllString(metrics, -1), "\n"))
		}
	}
	n.Stop()
	n.PoolOptions = ""
	n.Start()
	if got := left(t, n, nil); got != 0 {
		t.Errorf("more is promised than there is, and %d are left", got)
	}
	_, err = n.Client.Create(ctxOf(t), "new", 16<<20, v, nil, nil)
	refused(t, err, codes.ResourceExhausted, "overcommit=1")
	_, err = expand(t, n, ids[0], 416<<20)
	refused(t, err, codes.ResourceExhausted, "overcommit=1")
	for _, id := range ids {
		v.ID = id
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(id), false))
		write(t, n.Target(id)+"/f", "used as before")
	}
	for _, id := range ids {
		down(t, n, id, n.Target(id))
	}
}

func scrape(t *testing.T, address string) string {
	t.Helper()
	r, err := http.Get("http://" + address + "/metrics")
	ok(t, err)
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	ok(t, err)
	return string(b)
}

// A05: space of other files beside the pool is not promised, until they are gone.
func TestA05_WhatOthersTakeIsNotPromised(t *testing.T) {
	t.Parallel()
	n := newOnSmallPool(t, "ext4")
	raw := csiclient.Volume{Block: true}
	_, err := n.Client.Create(ctxOf(t), "a", 16<<20, raw, nil, nil)
	ok(t, err)
	before := left(t, n, nil)
	stranger := filepath.Join(n.PoolDir(), "stranger")
	run(t, "fallocate", "-l", itoa(int(before/2)), stranger)
	_, err = n.Client.Create(ctxOf(t), "b", before*3/4, raw, nil, nil)
	refused(t, err, codes.ResourceExhausted, "promised")
	ok(t, os.Remove(stranger))
	_, err = n.Client.Create(ctxOf(t), "b", before*3/4, raw, nil, nil)
	ok(t, err)
	_, err = n.Client.Create(ctxOf(t), "c", before*3/4, raw, nil, nil)
	refused(t, err, codes.ResourceExhausted, "promised")
}

// A05: room that a deleted volume freed, and that others took meanwhile, is not promised.
func TestA05_WhatIsFreedAndTakenIsNotPromised(t *testing.T) {
	t.Parallel()
	n := newOnSmallPool(t, "ext4")
	raw := csiclient.Volume{Block: true}
	first := left(t, n, nil)
	made, err := n.Client.Create(ctxOf(t), "a", 300<<20, raw, nil, nil)
	ok(t, err)
	patch(t, image(n, made.GetVolumeId()), 0, []byte(strings.Repeat("data", 50<<20)))
	left(t, n, nil) // makes the pool look at its files
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	run(t, "fallocate", "-l", itoa(200<<20), filepath.Join(n.PoolDir(), "stranger"))
	_, err = n.Client.Create(ctxOf(t), "b", first-100<<20, raw, nil, nil)
	refused(t, err, codes.ResourceExhausted, "promised")
	_, err = n.Client.Create(ctxOf(t), "c", first-300<<20, raw, nil, nil)
	ok(t, err)
}

// A05: on a pool that its volumes filled, records can still be written: volumes and snapshots are
// unpublished and deleted, and new facts about them are kept.
func TestA05_AFullPoolCanBeManaged(t *testing.T) {
	t.Parallel()
	for _, pool := range []string{"ext4", "xfs"} {
		t.Run("pool on "+pool, func(t *testing.T) {
			n := stoppedOnPool(t, pool, "", 512<<20)
			n.PoolOptions = ",overcommit=10"
			n.Begin()
			v, target := rawVolume(t, n, "a", "thin")
			fresh := map[string]csiclient.Volume{}
			for _, name := range []string{"b", "c"} {
				made, err := n.Client.Create(ctxOf(t), name, 1<<30, csiclient.Volume{Block: true}, nil, nil)
				ok(t, err)
				fresh[name] = csiclient.Volume{ID: made.GetVolumeId(), Block: true}
			}
			made, err := n.Client.Create(ctxOf(t), "fs", 64<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
			ok(t, err)
			// A file system volume is staged raw: the driver must remember that.
			asRaw := csiclient.Volume{ID: made.GetVolumeId(), Block: true}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			sid, err := snapshotNow(t, n, v.ID, "s")
			ok(t, err)
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			ok(t, n.Client.Stage(ctxOf(t), fresh["b"]))
			ok(t, n.Client.Publish(ctxOf(t), fresh["b"], n.Target("b"), false))
			// A tenant fills the pool, to the last block and again.
			crowd := func() {
				for i := range 3 {
					_ = exec.Command("dd", "if=/dev/zero", "of="+n.Target("b"), "bs=64k", "oflag=direct", "seek="+itoa(i*4000),
						"count=16000", "status=none").Run()
				}
				fill(filepath.Join(filepath.Dir(n.PoolDir()), "filler"+itoa(os.Getpid())))
			}
			crowd()
			ok(t, n.Client.Stage(ctxOf(t), asRaw))
			crowd()
			ok(t, n.Client.Unstage(ctxOf(t), asRaw.ID))
			n.Restart()
			refused(t, n.Client.Stage(ctxOf(t), csiclient.Volume{ID: asRaw.ID, FSType: "ext4"}), codes.FailedPrecondition,
				"raw block device before")
			ok(t, n.Client.Unstage(ctxOf(t), asRaw.ID))
			_, err = n.Client.Create(ctxOf(t), "d", 16<<20, csiclient.Volume{Block: true}, nil, nil)
			if err == nil {
				t.Log("a record more did fit")
			} else {
				refused(t, err, codes.ResourceExhausted)
			}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			ok(t, n.Client.Delete(ctxOf(t), fresh["c"].ID))
			crowd()
			_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
			ok(t, err)
			crowd()
			ok(t, n.Client.Delete(ctxOf(t), v.ID))
			down(t, n, fresh["b"].ID, n.Target("b"))
			ok(t, n.Client.Delete(ctxOf(t), asRaw.ID))
			list, err := n.Client.ListVolumes(ctxOf(t), &csi.ListVolumesRequest{})
			ok(t, err)
			for _, e := range list.GetEntries() {
				ok(t, n.Client.Delete(ctxOf(t), e.GetVolume().GetVolumeId()))
			}
		})
	}
}

// Writes that a full pool lost are reported at once, and still when there is room again.
func TestA05_LostWritesAreNoDegradation(t *testing.T) {
	t.Parallel()
	for _, fs := range []string{"ext4", "xfs", "btrfs", ""} {
		t.Run("volume of "+fs, func(t *testing.T) {
			n := stoppedOnPool(t, "ext4", "", 640<<20)
			n.Begin()
			v := csiclient.Volume{FSType: fs, Block: fs == ""}
			made, err := n.Client.Create(ctxOf(t), "a", 320<<20, v, nil, nil)
			ok(t, err)
			v.ID = made.GetVolumeId()
			target := n.Target("a")
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			if got := statuses(t, n, v.ID, target); strings.Contains(got, "INACCESSIBLE") || strings.Contains(got, "DATA_LOSS") ||
				strings.Contains(got, "DEGRADED") {
				t.Errorf("a sound volume: %s", got)
			}
			filler := filepath.Join(filepath.Dir(n.PoolDir()), "filler")
			fill(filler)
			if got := statuses(t, n, v.ID, target); !strings.Contains(got, "PoolFull=INACCESSIBLE") {
				t.Errorf("on a full pool: %s", got)
			}
			to := target + "/f"
			if fs == "" {
				to = target
			}
			_ = exec.Command("dd", "if=/dev/urandom", "of="+to, "bs=1M", "count=100", "status=none").Run() // usually succeeds
			if got := statuses(t, n, v.ID, target); !strings.Contains(got, "WritesLost=DATA_LOSS") {
				t.Errorf("after writes that failed: %s", got)
			}
			ok(t, os.Remove(filler))
			if got := statuses(t, n, v.ID, target); !strings.Contains(got, "WritesLost=DATA_LOSS") {
				t.Errorf("there is room again: %s", got)
			}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			ok(t, n.Client.Delete(ctxOf(t), v.ID))
		})
	}
}

func statuses(t *testing.T, n *testnode.Node, id, path string) string {
	t.Helper()
	h, err := n.Client.NodeGetVolumeHealth(ctxOf(t), &csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: path})
	ok(t, err)
	var out []string
	for _, s := range h.GetVolumeHealth().GetHealthStatuses() {
		out = append(out, s.GetReason()+"="+s.GetStatus().String())
	}
	return strings.Join(out, ",")
}

// A05: a snapshot has what its volume's pod has written, also what is still in the page cache when
// the snapshot is asked for. That space is promised, or there is no snapshot.
func TestA05_ASnapshotOfWhatIsNotWrittenOutYet(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	n := newOnSmallPool(t, "xfs")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	before := left(t, n, nil)
	made, err := n.Client.Create(ctxOf(t), "b", before-60*mib, csiclient.Volume{Block: true}, nil, nil)
	ok(t, err)
	rest := left(t, n, nil)
	run(t, "dd", "if=/dev/urandom", "of="+target+"/f", "bs=1M", "count=150")
	_, err = snapshotNow(t, n, v.ID, "s")
	refused(t, err, codes.ResourceExhausted, "promised")
	if got := left(t, n, nil); got < rest-rest/50-4*mib { // reported to 1 %
		t.Errorf("%d were left to promise; after a refused snapshot, %d", rest, got)
	}
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	sid, err := snapshotNow(t, n, v.ID, "s")
	ok(t, err)
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
	ok(t, err)
	down(t, n, v.ID, target)
}

// A05: what is written out while a snapshot is made counts once.
func TestA05_ASnapshotThatFitsIsMade(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	n := newOnSmallPool(t, "xfs")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	made, err := n.Client.Create(ctxOf(t), "b", left(t, n, nil)-200*mib, csiclient.Volume{Block: true}, nil, nil)
	ok(t, err)
	run(t, "dd", "if=/dev/urandom", "of="+target+"/f", "bs=1M", "count=100")
	sid, err := snapshotNow(t, n, v.ID, "s")
	ok(t, err)
	if got := left(t, n, nil); got > 110*mib {
		t.Errorf("a snapshot of more than 100 MiB was taken where 200 were left; %d are left", got)
	}
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	down(t, n, v.ID, target)
}
