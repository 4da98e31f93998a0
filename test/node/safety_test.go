package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// withPrograms makes the driver find these shell scripts before the real programs.
func withPrograms(t testing.TB, n *testnode.Node, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range scripts {
		ok(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755))
	}
	n.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
	n.Restart()
}

// D01: a volume's users may have written anywhere on it as a raw block device.
func TestD01_GivenOutAsRawBlockIsNeverFormatted(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	asBlock := func(v csiclient.Volume, off int64) {
		t.Helper()
		v.Block, v.FSType = true, ""
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target("raw"), false))
		patch(t, n.Target("raw"), off, bytes.Repeat([]byte("data"), 1<<19))
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("raw")))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
	v := create(t, n, "sampled", csiclient.Volume{FSType: "ext4"})
	asBlock(v, 6<<20)
	before := sum(t, image(n, v.ID))
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "raw block device", "delete the volume")
	if sum(t, image(n, v.ID)) != before {
		t.Error("the data changed")
	}
	down(t, n, v.ID)

	// An interrupted format may not continue.
	withPrograms(t, n, map[string]string{"mkfs.ext4": "exit 1"})
	v = create(t, n, "begun", csiclient.Volume{FSType: "ext4"})
	if n.Client.Stage(ctxOf(t), v) == nil {
		t.Fatal("a mkfs that fails is no error")
	}
	n.Env = nil
	n.Restart()
	asBlock(v, 0)
	before = sum(t, image(n, v.ID))
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "raw block device")
	if sum(t, image(n, v.ID)) != before {
		t.Error("the data changed")
	}
	down(t, n, v.ID)
}

func TestD08_ACheckOutlivesItsCallerAndTheDriver(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	run(t, "debugfs", "-w", "-R", "ssv state 2", image(n, v.ID))
	// The first check is on a copy, and may be interrupted; the repair may not. It can leave its
	// marks only on its device: at the end, which is free.
	mark := func(word string, mb int) string {
		return "printf " + word + " | dd of=$dev bs=1M seek=" + itoa(mb) + " conv=notrunc,fsync status=none; "
	}
	const begun, ended = 500, 510
	withPrograms(t, n, map[string]string{"e2fsck": `for dev; do :; done; case "$dev" in /dev/*) ;; *) exit 1;; esac; ` +
		mark("begun", begun) + "sleep 1; echo checked; echo checked >&2; " + mark("ended", ended) + "exit 1"})
	go func() { _ = n.Client.Stage(ctxOf(t), v) }() // its caller leaves with the driver
	appears := func(word string, mb int64) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			got := make([]byte, len(word))
			f, err := os.Open(image(n, v.ID))
			ok(t, err)
			_, err = f.ReadAt(got, mb<<20)
			f.Close()
			if ok(t, err); string(got) == word {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("no %s: the check was cut short", word)
			}
		}
	}
	appears("begun", begun)
	n.Kill()
	appears("ended", ended)
	n.Env = nil
	n.Start()
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	ok(t, n.Client.Stage(ctxOf(t), v))
	down(t, n, v.ID)
}

// loopOf makes a block device of a new file.
func loopOf(t testing.TB, fstype string) string {
	t.Helper()
	disk := filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(disk, nil, 0o600))
	ok(t, os.Truncate(disk, size))
	run(t, "mkfs."+fstype, "-q", disk)
	dev := strings.TrimSpace(run(t, "losetup", "-f", "--show", disk))
	t.Cleanup(func() { run(t, "losetup", "-d", dev) })
	return dev
}

// A static volume's path may lead nowhere, or to another disk, when the driver restarts.
func TestStaticDeviceBehindAPathThatChanged(t *testing.T) {
	t.Parallel()
	one, two := loopOf(t, "ext4"), loopOf(t, "ext4")
	link := filepath.Join(t.TempDir(), "by-name")
	ok(t, os.Symlink(one, link))
	n := testnode.New(t, "", "--allow-device", link, "--allow-device", one)
	v := csiclient.Volume{ID: "disk", FSType: "ext4", Context: map[string]string{"device": link}}
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	write(t, n.Target("a")+"/f", "of the first disk")
	sameDisk := func() {
		t.Helper()
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false))
		if got := read(t, n.Target("b")+"/f"); got != "of the first disk" {
			t.Errorf("the second target shows %q", got)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("b")))
	}
	n.Kill()
	ok(t, os.Remove(link))
	n.Start()
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, n.Target("a"))
	sameDisk()
	other := csiclient.Volume{ID: "other", Block: true, Context: map[string]string{"device": one}}
	refused(t, n.Client.Stage(ctxOf(t), other), codes.FailedPrecondition, "staged as volume disk")
	n.Kill()
	ok(t, os.Symlink(two, link))
	n.Start()
	sameDisk()
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, n.Target("a"))
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

func TestPartOfAFileIsNotTheVolume(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	stray := strings.TrimSpace(run(t, "losetup", "-f", "--show", "-o", "1048576", image(n, v.ID)))
	ok(t, n.Client.Stage(ctxOf(t), v))
	run(t, "losetup", "-d", stray)
	if out := run(t, "dumpe2fs", "-h", image(n, v.ID)); !strings.Contains(out, "Block count:              131072") {
		t.Errorf("the file system does not span the volume:\n%s", out)
	}
	down(t, n, v.ID)
}

func TestVolumesOfAPoolThatIsNotConfigured(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "of-no-pool", csiclient.Volume{FSType: "ext4"})
	foreign := strings.Replace(v.ID, "pool.", "other.", 1)
	refused(t, n.Client.Delete(ctxOf(t), foreign), codes.FailedPrecondition, "other", "start the driver with that pool")
	ok(t, n.Client.Unstage(ctxOf(t), foreign)) // nothing of it is here
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// A due growth does not stop a pod that mounts the volume read-only by mountOptions.
func TestGrowthDueAndMountOptionReadOnly(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for _, fs := range filesystems {
		v := create(t, n, fs, csiclient.Volume{FSType: fs})
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		_, err := n.Client.Expand(ctxOf(t), v.ID, 2*size, "")
		ok(t, err)
		v.MountFlags = []string{"ro"}
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(fs), false))
		down(t, n, v.ID, n.Target(fs))
	}
}

func TestRepublishWithAnotherGroup(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	idmap := csiclient.Volume{FSType: "ext4", Group: "2000", Context: map[string]string{"fsGroupStrategy": "idmap"}}
	v, target := up(t, n, "a", idmap)
	other := v
	other.Group = "3000"
	ok(t, n.Client.Publish(ctxOf(t), other, n.Target("b"), false))
	ok(t, n.Client.Publish(ctxOf(t), other, n.Target("b"), false))
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false), codes.AlreadyExists, "3000", "2000")
	down(t, n, v.ID, target, n.Target("b"))
}

// A repeated call with another group would say that the files have it.
func TestF01_ARepeatedPublishAsksForTheSameGroup(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4", Group: "2000"})
	other, none := v, v
	other.Group, none.Group = "3000", ""
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	refused(t, n.Client.Publish(ctxOf(t), other, target, false), codes.AlreadyExists, "2000", "3000", "unpublish it first")
	refused(t, n.Client.Publish(ctxOf(t), none, target, false), codes.AlreadyExists, "2000")
	if got := groupOf(t, target); got != 2000 {
		t.Errorf("the files have group %d", got)
	}
	// A pod that starts beside it gives the files to its own group, as with a kubelet. That is no reason to refuse the first pod's repeat.
	ok(t, n.Client.Publish(ctxOf(t), other, n.Target("b"), false))
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	ok(t, n.Client.Publish(ctxOf(t), none, n.Target("c"), false))
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("c"), false), codes.AlreadyExists, "2000")
	down(t, n, v.ID, target, n.Target("b"), n.Target("c"))
}

func groupOf(t testing.TB, path string) uint32 {
	t.Helper()
	st, err := os.Lstat(path)
	ok(t, err)
	return st.Sys().(*syscall.Stat_t).Gid
}

func TestF03_SubvolumesAndFilesThatNobodyMayChange(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "btrfs", csiclient.Volume{FSType: "btrfs"})
	for _, sub := range []string{"/s1", "/s2"} { // with the same inode numbers
		run(t, "btrfs", "subvolume", "create", target+sub)
		write(t, target+sub+"/f", "x")
		ok(t, os.Link(target+sub+"/f", target+sub+"/g"))
	}
	run(t, "btrfs", "subvolume", "snapshot", "-r", target+"/s1", target+"/kept")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	v.Group = "3000"
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	for _, f := range []string{"/s1/f", "/s2/f", "/s1", "/s2"} {
		if got := groupOf(t, target+f); got != 3000 {
			t.Errorf("%s has group %d", f, got)
		}
	}
	said(t, n, "that nobody may change")
	run(t, "btrfs", "property", "set", target+"/kept", "ro", "false")
	down(t, n, v.ID, target)

	v, target = up(t, n, "ext4", csiclient.Volume{FSType: "ext4"})
	write(t, target+"/fixed", "x")
	write(t, target+"/free", "x")
	run(t, "chattr", "+i", target+"/fixed")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	v.Group = "3000"
	ok(t, n.Client.Publish(ctxOf(t), v, target, false))
	if got := groupOf(t, target+"/free"); got != 3000 {
		t.Errorf("the free file has group %d", got)
	}
	run(t, "chattr", "-i", target+"/fixed")
	down(t, n, v.ID, target)
}

func TestF02_AWalkBesideAPodThatMakesAndRemovesDirectories(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	stop := make(chan struct{})
	var pod sync.WaitGroup
	for i := range 4 {
		pod.Go(func() {
			dir := filepath.Join(target, "d"+strings.Repeat("x", i), "e/f/g")
			for {
				select {
				case <-stop:
					return
				default:
				}
				_ = os.MkdirAll(dir, 0o755)
				_ = os.RemoveAll(filepath.Join(target, "d"+strings.Repeat("x", i)))
			}
		})
	}
	for i := range 20 {
		w := v
		w.Group = []string{"3000", "4000"}[i%2]
		if err := n.Client.Publish(ctxOf(t), w, n.Target("b"), false); err != nil {
			t.Error(err)
			break
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("b")))
	}
	close(stop)
	pod.Wait()
	down(t, n, v.ID, target)
}

// A snapshot cannot be deleted while it is being taken.
func TestDeleteSnapshotWhileItIsTaken(t *testing.T) {
	t.Parallel()
	n, points := switchable(t)
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	var id string
	hung, done := points.Hang(t, "snapshot.recorded", func() error {
		r, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
		id = r.GetSnapshot().GetSnapshotId()
		return err
	})
	if !hung {
		t.Fatalf("no snapshot was begun: %v", <-done)
	}
	names, err := filepath.Glob(filepath.Join(n.PoolDir(), "snapshots/*.json"))
	ok(t, err)
	if len(names) != 1 {
		t.Fatalf("snapshots that are recorded: %v", names)
	}
	snap := "pool." + strings.TrimSuffix(filepath.Base(names[0]), ".json")
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: snap})
	refused(t, err, codes.Aborted)
	points.Off(t)
	ok(t, <-done)
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: id})
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}
