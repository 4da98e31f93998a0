//go:build vm

// D11: sick storage needs device-mapper, which the guests' kernels have.

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// sickDisk is a mapped device whose parts can be made to fail.
type sickDisk struct {
	t          *testing.T
	name, loop string
	sectors    int64
}

func newDisk(t *testing.T, bytes int64) *sickDisk {
	t.Helper()
	t.Setenv("DM_DISABLE_UDEV", "1") // no udev runs in the guests
	file := filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(file, nil, 0o600))
	ok(t, os.Truncate(file, bytes))
	d := &sickDisk{t: t, name: "sick-" + strconv.FormatInt(time.Now().UnixNano(), 36), sectors: bytes / 512}
	d.loop = strings.TrimSpace(run(t, "losetup", "-f", "--show", file))
	t.Cleanup(func() { run(t, "losetup", "-d", d.loop) })
	run(t, "dmsetup", "create", d.name, "--table", d.sound(0, d.sectors))
	t.Cleanup(func() { run(t, "dmsetup", "remove", "--retry", d.name) })
	return d
}

func (d *sickDisk) path() string { return "/dev/mapper/" + d.name }

func (d *sickDisk) sound(from, sectors int64) string {
	return fmt.Sprintf("%d %d linear %s %d", from, sectors, d.loop, from)
}

// is gives the disk another table. It does not wait for I/O in flight.
func (d *sickDisk) is(table string) {
	d.t.Helper()
	run(d.t, "dmsetup", "suspend", "--noflush", "--nolockfs", d.name)
	run(d.t, "dmsetup", "load", d.name, "--table", table)
	run(d.t, "dmsetup", "resume", d.name)
}

func (d *sickDisk) well() { d.t.Helper(); d.is(d.sound(0, d.sectors)) }
func (d *sickDisk) dead() { d.t.Helper(); d.is(fmt.Sprintf("0 %d error", d.sectors)) }
func (d *sickDisk) slow(ms int) {
	d.t.Helper()
	d.is(fmt.Sprintf("0 %d delay %s 0 %d", d.sectors, d.loop, ms))
}

// deadAt makes some sectors fail.
func (d *sickDisk) deadAt(from, sectors int64) {
	d.t.Helper()
	end := from + sectors
	d.is(strings.Join([]string{d.sound(0, from), fmt.Sprintf("%d %d error", from, sectors), d.sound(end, d.sectors-end)}, "\n"))
}

// volume returns the disk as a static volume with a file system, and its node.
func (d *sickDisk) volume(fstype string) (*testnode.Node, csiclient.Volume) {
	d.t.Helper()
	run(d.t, "mkfs."+fstype, "-q", d.path())
	return testnode.New(d.t, "", "--allow-device", "/dev/mapper/*"), static("disk", d.path(), fstype)
}

// drop makes the kernel forget its page cache.
func drop(t testing.TB) {
	t.Helper()
	run(t, "sync")
	ok(t, os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0))
}

// D11: a disk that answers nothing is a clear error, not a blank disk, and affects no other volume.
// When the disk is healthy again, so is the volume.
func TestD11_ADeadDisk(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			d := newDisk(t, 512<<20)
			n, v := d.volume(fs)
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
			write(t, n.Target("a")+"/kept", "kept")
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			drop(t)
			d.dead()
			err := n.Client.Stage(ctxOf(t), v)
			if status.Code(err) == codes.OK || status.Code(err) == codes.DeadlineExceeded || !strings.Contains(err.Error(), v.ID) ||
				!strings.Contains(err.Error(), "input/output error") {
				t.Errorf("the stage of a dead disk: %v", err)
			}
			bystander(t, n, "a dead disk")
			d.well()
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
			if got := read(t, n.Target("a")+"/kept"); got != "kept" {
				t.Errorf("it has %q", got)
			}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		})
	}
}

// D11: a slow disk delays only its own volume. Callers with a deadline get an answer, and the stage
// continues.
func TestD11_ASlowDisk(t *testing.T) {
	d := newDisk(t, 512<<20)
	n, v := d.volume("ext4")
	drop(t)
	const ms = 2000
	d.slow(ms)
	short, cancel := context.WithTimeout(context.Background(), ms*time.Millisecond)
	defer cancel()
	if err := n.Client.Stage(short, v); err == nil {
		t.Fatal("the disk is not slow")
	}
	bystander(t, n, "a slow disk")
	again, cancel := context.WithTimeout(context.Background(), ms*time.Millisecond/4)
	defer cancel()
	switch code := status.Code(n.Client.Stage(again, v)); code {
	case codes.OK, codes.Aborted, codes.DeadlineExceeded, codes.Canceled:
	default:
		t.Errorf("a repeated stage: %s", code)
	}
	d.well()
	ok(t, stagePatiently(t, n, v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// D11: a disk breaks, or is pulled out, under a pod. The pod's writes fail, the health says so, and
// the volume can be taken away.
func TestD11_ADiskThatBreaksUnderAPod(t *testing.T) {
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			d := newDisk(t, 512<<20)
			n, v := d.volume(fs)
			ok(t, n.Client.Stage(ctxOf(t), v))
			target := n.Target("a")
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			write(t, target+"/kept", "kept")
			run(t, "sync", "-f", target)
			d.dead()
			f, err := os.OpenFile(target+"/lost", os.O_CREATE|os.O_WRONLY, 0o644)
			if err == nil {
				_, err = f.Write(make([]byte, 1<<20))
				err = errors.Join(err, f.Sync(), f.Close())
			}
			if err == nil {
				t.Fatal("a dead disk takes writes")
			}
			_ = runQuiet("sync", "-f", target) // now at the latest the file system notices
			for deadline := time.Now().Add(time.Minute); health(t, n, v.ID, target) == ""; time.Sleep(50 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Error("the condition of a volume whose disk is dead is good")
					break
				}
			}
			bystander(t, n, "a dead disk under a pod")
			n.Restart()
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			d.well()
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			if got := read(t, target+"/kept"); got != "kept" {
				t.Errorf("what was synced before is %q", got)
			}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		})
	}
}

// D11: errors in the middle of a change of group: no success, and the next publish does the rest.
func TestD11_ErrorsInTheMiddleOfAWalk(t *testing.T) {
	d := newDisk(t, 512<<20)
	n, v := d.volume("ext4")
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	const files = 300
	for i := range files {
		dir := fmt.Sprintf("%s/%d", target, i%10)
		ok(t, os.MkdirAll(dir, 0o755))
		write(t, fmt.Sprintf("%s/%d", dir, i), "x")
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	// The block of one directory cannot be read.
	words := strings.Fields(run(t, "sh", "-c", `debugfs -R "blocks /7" "$0" 2>/dev/null`, d.path()))
	block, err := strconv.ParseInt(words[0], 10, 64)
	ok(t, err)
	drop(t)
	ok(t, n.Client.Stage(ctxOf(t), v))
	d.deadAt(block*8, 8)
	err = n.Client.Publish(ctxOf(t), with(v, "4242"), target, false)
	if err == nil || !strings.Contains(err.Error(), v.ID) || !strings.Contains(err.Error(), "input/output error") {
		t.Fatalf("a walk over a directory that cannot be read: %v", err)
	}
	if table := mountinfo(t); strings.Contains(table, " "+target+" ") {
		t.Error("it is published all the same")
	}
	bystander(t, n, "a walk that failed")
	d.well()
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), with(v, "4242"), target, false))
	if out := run(t, "sh", "-c", `find "$0" ! -group 4242 -not -path "*/lost+found*" | wc -l`, target); strings.TrimSpace(out) != "0" {
		t.Errorf("%s files have another group", strings.TrimSpace(out))
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// D11: a pool's disk cannot be read in the middle of a copy. The copy fails with a clear error,
// leaves nothing, and succeeds when the disk is healthy.
func TestD11_ErrorsInTheMiddleOfACopy(t *testing.T) {
	d := newDisk(t, 1<<30)
	run(t, "mkfs.ext4", "-q", d.path())
	dir := t.TempDir()
	run(t, "mount", d.path(), dir)
	t.Cleanup(func() { testnode.Unmount(t, dir) })
	n := testnode.NewStopped(t, "")
	n.Pool, n.PoolOptions = filepath.Join(dir, "pool"), ""
	n.Begin()
	made, err := n.Client.Create(ctxOf(t), "a", 64<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
	ok(t, err)
	v := csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	run(t, "dd", "if=/dev/urandom", "of="+target+"/data", "bs=1M", "count=24", "conv=fsync", "status=none")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	before := usedFiles(t, n)
	drop(t)
	largest, at := int64(0), int64(0)
	for _, m := range regexp.MustCompile(`(?m)^\s*\d+:\s+\d+\.\.\s*\d+:\s+(\d+)\.\.\s*\d+:\s+(\d+):`).FindAllStringSubmatch(run(t,
		"filefrag", "-v", image(n, v.ID)), -1) {
		start, err := strconv.ParseInt(m[1], 10, 64)
		ok(t, err)
		length, err := strconv.ParseInt(m[2], 10, 64)
		ok(t, err)
		if length > largest {
			largest, at = length, start+length/2
		}
	}
	d.deadAt(at*8, 8)
	_, err = n.Client.Create(ctxOf(t), "b", 64<<20, csiclient.Volume{FSType: "ext4"}, nil, cloneOf(v.ID))
	if err == nil || !strings.Contains(err.Error(), "input/output error") {
		t.Fatalf("a copy of what cannot be read: %v", err)
	}
	if after := usedFiles(t, n); after != before {
		t.Errorf("a copy that failed left something:\n%s", after)
	}
	_, err = snapshotNow(t, n, v.ID, "s")
	if err == nil || !strings.Contains(err.Error(), "input/output error") {
		t.Fatalf("a snapshot of what cannot be read: %v", err)
	}
	d.well()
	drop(t)
	made, err = n.Client.Create(ctxOf(t), "b", 64<<20, csiclient.Volume{FSType: "ext4"}, nil, cloneOf(v.ID))
	ok(t, err)
	if sum(t, image(n, v.ID)) != sum(t, image(n, made.GetVolumeId())) {
		t.Error("the copy differs")
	}
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// D11: a server is gone. A call for a share's stats gets an answer in time, however often it is
// repeated, and does not lose a thread each time.
func TestD11_AServerThatIsGone(t *testing.T) {
	serveNFS(t)
	n := testnode.New(t, "")
	v := csiclient.Volume{ID: "share", Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
		Context: map[string]string{"server": "127.0.0.1", "share": "/"}}
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	write(t, target+"/kept", "kept")
	run(t, "rpc.nfsd", "0")
	t.Cleanup(func() { run(t, "rpc.nfsd", "--no-udp", "-N", "3", "2") })
	threads := func() int {
		t.Helper()
		status := read(t, fmt.Sprintf("/proc/%d/status", n.PID()))
		number, err := strconv.Atoi(regexp.MustCompile(`Threads:\s+(\d+)`).FindStringSubmatch(status)[1])
		ok(t, err)
		return number
	}
	before := threads()
	asked := func(within time.Duration) error {
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		_, err := n.Client.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target})
		return err
	}
	if err := asked(2 * time.Second); err == nil {
		t.Fatal("a server that is gone tells how full its share is")
	}
	// A call that came before the driver gave up on the first hangs as well.
	for late := 0; status.Code(asked(2*time.Second)) != codes.Aborted; late++ {
		if late > 3 {
			t.Fatal("each call hangs anew")
		}
	}
	for range 50 {
		refused(t, asked(time.Minute), codes.Aborted, v.ID, "has not come back")
	}
	if after := threads(); after > before+10 {
		t.Errorf("%d threads before, %d after 50 calls", before, after)
	}
	bystander(t, n, "a server that is gone")
	run(t, "rpc.nfsd", "--no-udp", "-N", "3", "2")
	for deadline := time.Now().Add(3 * time.Minute); asked(10*time.Second) != nil; time.Sleep(time.Second) {
		if time.Now().After(deadline) {
			t.Fatal("the server is back, and nobody is told how full its share is")
		}
	}
	if got := read(t, target+"/kept"); got != "kept" {
		t.Errorf("the share has %q", got)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}
