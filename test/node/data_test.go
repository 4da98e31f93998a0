package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func sum(t testing.TB, path string) (out [sha256.Size]byte) {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
	defer f.Close()
	// In pieces, without empty ones: an image does not fit into a guest's memory, and an emulated
	// processor takes a minute to hash it all.
	h := sha256.New()
	piece, nothing := make([]byte, 64<<10), make([]byte, 64<<10)
	for at := 0; ; at += len(piece) {
		n, err := io.ReadFull(f, piece)
		if !bytes.Equal(piece[:n], nothing[:n]) {
			fmt.Fprint(h, at, " ")
			h.Write(piece[:n])
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			fmt.Fprint(h, at+n)
			break
		}
		ok(t, err)
	}
	h.Sum(out[:0])
	return out
}

func patch(t testing.TB, path string, off int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	ok(t, err)
	_, err = f.WriteAt(data, off)
	ok(t, err)
	ok(t, f.Sync())
	ok(t, f.Close())
}

func TestD01_ForeignAndDamagedDataIsNeverFormatted(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for name, spoil := range map[string]func(img string){
		"garbage at the start": func(img string) { patch(t, img, 512, []byte("somebody's data")) },
		"garbage at the end":   func(img string) { patch(t, img, size-4096, []byte("somebody's data")) },
		"luks":                 func(img string) { patch(t, img, 0, []byte("LUKS\xba\xbe\x00\x02")) },
		"ext4 damaged":         func(img string) { run(t, "mkfs.ext4", "-q", "-F", img); patch(t, img, 1024+0x78, []byte("x")) },
		"xfs damaged":          func(img string) { run(t, "mkfs.xfs", "-q", "-f", img); patch(t, img, 108, []byte("x")) },
		"xfs":                  func(img string) { run(t, "mkfs.xfs", "-q", "-f", img) },
		"ext4 without its start": func(img string) {
			run(t, "mkfs.ext4", "-q", "-F", img)
			patch(t, img, 0, make([]byte, 1<<20))
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := create(t, n, name, csiclient.Volume{FSType: "ext4"})
			img := image(n, v.ID)
			spoil(img)
			before := sum(t, img)
			refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID)
			if sum(t, img) != before {
				t.Error("the image changed")
			}
			down(t, n, v.ID)
		})
	}
}

func TestD02_FormattedOnceNeverAgain(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{FSType: fs})
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			n.Stop()
			// The state directory is lost; the pool keeps the fact. And all is zero, not only the
			// first MiB.
			ok(t, os.RemoveAll(filepath.Join(n.Dir, "state")))
			img := image(n, v.ID)
			ok(t, os.Truncate(img, 0))
			ok(t, os.Truncate(img, size))
			n.Start()
			before := sum(t, img)
			refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "was formatted with "+fs)
			if sum(t, img) != before {
				t.Error("the image changed")
			}
			down(t, n, v.ID)
		})
	}
}

func TestD03_DeleteRefusesWhileUsed(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	write(t, target+"/f", "precious")
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, "published")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, "staged")
	for _, id := range []string{"pool.v00000000000000000000000000000000", v.ID + "x", "../" + v.ID, strings.ToUpper(v.ID)} {
		ok(t, n.Client.Delete(ctxOf(t), id))
	}
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if read(t, target+"/f") != "precious" {
		t.Error("the data is gone")
	}
	down(t, n, v.ID, target)
}

func TestD04_TargetWithDataIsLeftAlone(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	ok(t, os.MkdirAll(target, 0o750))
	write(t, target+"/f", "not a volume's")
	refused(t, n.Client.Publish(ctxOf(t), v, target, false), codes.FailedPrecondition, target, "holds data")
	refused(t, n.Client.Unpublish(ctxOf(t), v.ID, target), codes.FailedPrecondition, "holds data")
	if read(t, target+"/f") != "not a volume's" {
		t.Error("the file changed")
	}
	ok(t, os.Remove(target+"/f"))
	down(t, n, v.ID, target)
}

// Not beside other tests, which mount.
func TestD05_PathsThroughLinksAndOutside(t *testing.T) {
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), v))
	outside := t.TempDir()
	before := mountinfo(t)
	ok(t, os.MkdirAll(filepath.Join(n.KubeletDir(), "pods"), 0o750))
	ok(t, os.Symlink(outside, filepath.Join(n.KubeletDir(), "pods/link")))
	ok(t, os.Symlink(outside, filepath.Join(n.KubeletDir(), "pods/leaf")))
	publish := func(target string) error {
		_, err := n.Client.NodePublishVolume(ctxOf(t), &csi.NodePublishVolumeRequest{
			VolumeId: v.ID, StagingTargetPath: n.Client.StagingPath(v.ID), TargetPath: target, VolumeCapability: v.Capability()})
		return err
	}
	refused(t, publish(filepath.Join(n.KubeletDir(), "pods/link/mount")), codes.InvalidArgument, "symbolic link")
	refused(t, publish(filepath.Join(n.KubeletDir(), "pods/leaf")), codes.FailedPrecondition, "symbolic link")
	refused(t, publish(outside+"/mount"), codes.InvalidArgument, "where all targets lie")
	refused(t, publish(n.KubeletDir()+"/pods/../../escape"), codes.InvalidArgument)
	refused(t, publish(n.KubeletDir()), codes.InvalidArgument)
	refused(t, publish("relative"), codes.InvalidArgument)
	if after := mountinfo(t); after != before {
		t.Error("something was mounted")
	}
	if left, _ := os.ReadDir(outside); len(left) > 0 {
		t.Errorf("something was made outside: %v", left)
	}
	down(t, n, v.ID)
}

func TestD07_FullPool(t *testing.T) {
	t.Parallel()
	n := newOnSmallPool(t, "ext4")
	before := usedFiles(t, n)
	params := map[string]string{"provisioning": "thick"}
	_, err := n.Client.Create(ctxOf(t), "too large", 2<<30, csiclient.Volume{FSType: "ext4"}, params, nil)
	refused(t, err, codes.ResourceExhausted, "full")
	if after := usedFiles(t, n); after != before {
		t.Errorf("a failed create left something: %s", after)
	}
	made, err := n.Client.Create(ctxOf(t), "thick", 256<<20, csiclient.Volume{FSType: "ext4"}, params, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
	target := n.Target("thick")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	// A thick volume that cannot grow does not take the others' space meanwhile.
	_, err = n.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30}})
	refused(t, err, codes.ResourceExhausted, "full")
	spare, err := n.Client.Create(ctxOf(t), "spare", 16<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
	ok(t, err)
	ok(t, n.Client.Stage(ctxOf(t), csiclient.Volume{ID: spare.GetVolumeId(), FSType: "ext4"}))
	snap, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: spare.GetVolumeId(), Name: "spare"})
	ok(t, err)
	ok(t, n.Client.Unstage(ctxOf(t), spare.GetVolumeId()))
	clone, err := n.Client.Create(ctxOf(t), "clone", 0, csiclient.Volume{FSType: "ext4"}, nil, &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: spare.GetVolumeId()}}})
	ok(t, err)
	filler := filepath.Join(n.PoolDir(), "filler")
	fill(filler)
	// A volume that was formatted before works on a full pool, although new facts about it cannot
	// be written there. One that cannot grow is unchanged.
	copied := csiclient.Volume{ID: clone.GetVolumeId(), FSType: "ext4"}
	ok(t, n.Client.Stage(ctxOf(t), copied))
	ok(t, n.Client.Publish(ctxOf(t), copied, n.Target("clone"), true))
	ok(t, n.Client.Unpublish(ctxOf(t), copied.ID, n.Target("clone")))
	_, err = n.Client.ControllerExpandVolume(ctxOf(t),
		&csi.ControllerExpandVolumeRequest{VolumeId: copied.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 30}})
	refused(t, err, codes.ResourceExhausted, "full")
	if st, err := os.Stat(image(n, copied.ID)); err != nil || st.Size() != clone.GetCapacityBytes() {
		t.Errorf("an expansion that failed left %v %v", st.Size(), err)
	}
	down(t, n, copied.ID)
	fill(filler + "4")
	// Calls that make room work on a full pool.
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshot().GetSnapshotId()})
	ok(t, err)
	fill(filler + "2")
	ok(t, n.Client.Delete(ctxOf(t), spare.GetVolumeId()))
	fill(filler + "3")
	ok(t, os.WriteFile(target+"/data", []byte(strings.Repeat("x", 200<<20)), 0o644))
	run(t, "sync", "-f", target)
	run(t, "fstrim", "-v", "/") // trims another file system: must have no effect
	ok(t, os.Remove(target+"/data"))
	_ = runQuiet("fstrim", target) // the device takes no discards
	ok(t, os.WriteFile(target+"/again", []byte(strings.Repeat("y", 200<<20)), 0o644))
	run(t, "sync", "-f", target)
	if h := health(t, n, v.ID, target); !strings.Contains(h, "PoolNearlyFull") {
		t.Errorf("health says nothing of the full pool: %q", h)
	}
	_, err = n.Client.Create(ctxOf(t), "another", 64<<20, csiclient.Volume{FSType: "ext4"}, params, nil)
	refused(t, err, codes.ResourceExhausted)
	for _, f := range []string{filler, filler + "2", filler + "3", filler + "4"} {
		ok(t, os.Remove(f))
	}
	if got := read(t, target+"/again"); got != strings.Repeat("y", 200<<20) {
		t.Error("the thick volume's data is wrong")
	}
	down(t, n, v.ID, target)
}

func health(t testing.TB, n *testnode.Node, id, path string) string {
	t.Helper()
	h, err := n.Client.NodeGetVolumeHealth(ctxOf(t), &csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: path})
	ok(t, err)
	var out []string
	for _, s := range h.GetVolumeHealth().GetHealthStatuses() {
		out = append(out, s.GetReason())
	}
	return strings.Join(out, ",")
}

// Somebody removed the volume's file. The rest must not block its removal for ever.
func TestVolumeWhoseFileIsGoneCanBeLetGo(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, os.Remove(image(n, v.ID)))
	n.Restart()
	if h := health(t, n, v.ID, target); !strings.Contains(h, "ImageGone") {
		t.Errorf("health says %q", h)
	}
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, target)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "is gone", "delete the volume")
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

func TestD09_CopiesBesideTheirOriginAndGrown(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "origin", csiclient.Volume{FSType: fs})
			write(t, target+"/f", "of the origin")
			snap, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "snap"})
			ok(t, err)
			write(t, target+"/f", "changed since")
			sid := snap.GetSnapshot().GetSnapshotId()
			restored, err := n.Client.Create(ctxOf(t), "restored", 2*size, csiclient.Volume{FSType: fs}, nil, &csi.VolumeContentSource{
				Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: sid}}})
			ok(t, err)
			clone, err := n.Client.Create(ctxOf(t), "clone", 0, csiclient.Volume{FSType: fs}, nil, &csi.VolumeContentSource{
				Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.ID}}})
			ok(t, err)
			for name, want := range map[string]string{"restored": "of the origin", "clone": "changed since"} {
				c := csiclient.Volume{ID: map[string]*csi.Volume{"restored": restored, "clone": clone}[name].GetVolumeId(), FSType: fs}
				ok(t, n.Client.Stage(ctxOf(t), c))
				ok(t, n.Client.Publish(ctxOf(t), c, n.Target(name), false))
				if got := read(t, n.Target(name)+"/f"); got != want {
					t.Errorf("%s holds %q, want %q", name, got, want)
				}
			}
			r, err := n.Client.NodeGetVolumeStats(ctxOf(t),
				&csi.NodeGetVolumeStatsRequest{VolumeId: restored.GetVolumeId(), VolumePath: n.Target("restored")})
			ok(t, err)
			if total := r.GetUsage()[0].GetTotal(); total < size*3/2 {
				t.Errorf("the restored volume was not grown: %d bytes", total)
			}
			write(t, target+"/g", "the origin is not frozen")
			_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: sid})
			ok(t, err)
			down(t, n, restored.GetVolumeId(), n.Target("restored"))
			down(t, n, clone.GetVolumeId(), n.Target("clone"))
			down(t, n, v.ID, target)
		})
	}
}

func TestSnapshotOfABusyFilesystemIsConsistent(t *testing.T) {
	t.Parallel()
	for _, pool := range []string{"ext4", "xfs"} { // copied byte by byte; extents shared
		t.Run("pool on "+pool, func(t *testing.T) {
			n := newOnSmallPool(t, pool)
			v := csiclient.Volume{FSType: "ext4"}
			made, err := n.Client.Create(ctxOf(t), "a", 128<<20, v, nil, nil)
			ok(t, err)
			v.ID = made.GetVolumeId()
			target := n.Target("a")
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			stop := make(chan struct{})
			var writer sync.WaitGroup
			writer.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					default:
						os.WriteFile(filepath.Join(target, "f"+itoa(i%200)), []byte(strings.Repeat("x", 5000)), 0o644)
					}
				}
			})
			for i := range 3 {
				s, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s" + itoa(i)})
				ok(t, err)
				id := s.GetSnapshot().GetSnapshotId()
				img := filepath.Join(n.PoolDir(), "snapshots", strings.TrimPrefix(id, "pool.")+".img")
				run(t, "e2fsck", "-f", "-n", img) // exits 0 only if it is clean
				_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: id})
				ok(t, err)
			}
			close(stop)
			writer.Wait()
			down(t, n, v.ID, target)
		})
	}
}

func TestAbortedWhileAnotherCallRuns(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	other := create(t, n, "b", csiclient.Volume{FSType: "ext4"})
	// A clone of 400 MiB takes a while, and holds its origin.
	data := make([]byte, 400<<20)
	for i := range data {
		data[i] = byte(i>>12) | 1
	}
	patch(t, image(n, v.ID), 0, data)
	source := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.ID}}}
	leave(t, func(ctx context.Context) error {
		_, err := n.Client.Create(ctx, "c", 0, csiclient.Volume{FSType: "ext4"}, nil, source)
		return err
	})
	_, err := n.Client.Create(ctxOf(t), "c", 0, csiclient.Volume{FSType: "ext4"}, nil, source)
	refused(t, err, codes.Aborted, "CreateVolume is running")
	refused(t, n.Client.Stage(ctxOf(t), v), codes.Aborted)
	ok(t, n.Client.Stage(ctxOf(t), other))
	// The copy continued without its caller; a repeated call finds it done.
	var made *csi.Volume
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if made, err = n.Client.Create(ctxOf(t), "c", 0, csiclient.Volume{FSType: "ext4"}, nil, source); status.Code(err) != codes.Aborted {
			break
		}
	}
	ok(t, err)
	for _, id := range []string{v.ID, other.ID, made.GetVolumeId()} {
		down(t, n, id)
	}
}
