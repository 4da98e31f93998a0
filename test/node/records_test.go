package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// spoilt are ways to damage a good record.
var spoilt = map[string]func(string) string{
	"empty":   func(string) string { return "" },
	"garbage": func(s string) string { return "\x00\x01" + s[:len(s)/2] },
	"newer":   func(s string) string { return strings.Replace(s, `"version": `, `"version": 99`, 1) },
	"other's": func(s string) string { return strings.ReplaceAll(s, "pool.v", "pool.v0") },
}

// spoil damages a record, and returns a function that repairs it.
func spoil(t testing.TB, path string, how func(string) string) (mend func()) {
	t.Helper()
	good := read(t, path)
	bad := how(good)
	if bad == good {
		t.Fatalf("%s was not changed: %s", path, good)
	}
	write(t, path, bad)
	return func() {
		t.Helper()
		if now := read(t, path); now != bad {
			t.Errorf("%s was touched: %q", path, now)
		}
		write(t, path, good)
	}
}

func volumeFile(n *testnode.Node, id, extension string) string {
	return strings.TrimSuffix(image(n, id), ".img") + extension
}

func TestA10_ABadRecordOfAPoolsVolumeIsThatVolumesAlone(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	good, goodTarget := up(t, n, "good", csiclient.Volume{FSType: "ext4"})
	bad := map[string]csiclient.Volume{}
	for name := range spoilt {
		bad[name], _ = up(t, n, name, csiclient.Volume{FSType: "ext4"})
		write(t, n.Target(name)+"/f", "kept "+name)
		ok(t, n.Client.Publish(ctxOf(t), bad[name], n.Target(name+"-ro"), true))
	}
	n.Stop()
	var mends []func()
	for name, how := range spoilt {
		mends = append(mends, spoil(t, volumeFile(n, bad[name].ID, ".json"), how))
	}
	n.Start()
	for name, v := range bad {
		said(t, n, volumeFile(n, v.ID, ".json"))
		// It is neither returned nor created again under its name, nor destroyed.
		file := volumeFile(n, v.ID, ".json")
		_, err := n.Client.Create(ctxOf(t), name, size, v, nil, nil)
		refused(t, err, codes.FailedPrecondition, v.ID, file, "put a good copy")
		refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition)
		refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID, file)
		refused(t, n.Client.Publish(ctxOf(t), v, n.Target("more"), false), codes.FailedPrecondition, v.ID, file)
		_, err = n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "s"})
		refused(t, err, codes.FailedPrecondition, v.ID, file)
		// The pod continues, and can end.
		if got := read(t, n.Target(name)+"/f"); got != "kept "+name {
			t.Errorf("read %q", got)
		}
		refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "still published")
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target(name)))
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target(name+"-ro")))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, file)
	}
	// Everything else works.
	write(t, goodTarget+"/f", "good")
	other, otherTarget := up(t, n, "other", csiclient.Volume{FSType: "ext4"})
	down(t, n, other.ID, otherTarget)
	n.Stop()
	for _, mend := range mends {
		mend()
	}
	n.Start()
	for name, v := range bad {
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(name), false))
		if got := read(t, n.Target(name)+"/f"); got != "kept "+name {
			t.Errorf("read %q", got)
		}
		down(t, n, v.ID, n.Target(name))
	}
	down(t, n, good.ID, goodTarget)
}

func TestA10_ABadRecordOfASnapshotIsThatSnapshotsAlone(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	snap := func(name string) (string, error) {
		s, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: name})
		return s.GetSnapshot().GetSnapshotId(), err
	}
	good, err := snap("good")
	ok(t, err)
	bad, err := snap("bad")
	ok(t, err)
	n.Stop()
	file := filepath.Join(n.PoolDir(), "snapshots", strings.TrimPrefix(bad, "pool.")+".json")
	mend := spoil(t, file, spoilt["empty"])
	n.Start()
	remove := func(id string) error {
		_, err := n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: id})
		return err
	}
	_, err = snap("bad")
	refused(t, err, codes.FailedPrecondition, bad, file)
	refused(t, remove(bad), codes.FailedPrecondition, bad, file)
	_, err = n.Client.Create(ctxOf(t), "copy", size, v, nil, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: bad}}})
	refused(t, err, codes.FailedPrecondition, bad, file)
	ok(t, remove(good))
	if _, err := os.Stat(strings.TrimSuffix(file, ".json") + ".img"); err != nil {
		t.Errorf("its bytes: %v", err)
	}
	n.Stop()
	mend()
	n.Start()
	ok(t, remove(bad))
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}

// stateFile returns the only record in a directory of the state.
func stateFile(t testing.TB, n *testnode.Node, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(n.Dir, "state", dir, "*.json"))
	ok(t, err)
	if len(names) != 1 {
		t.Fatalf("records in %s: %v", dir, names)
	}
	return names[0]
}

func TestA10_ABadRecordOfAStaticVolumeIsThatVolumesAlone(t *testing.T) {
	t.Parallel()
	dev := loopOf(t, "ext4")
	n := testnode.New(t, "", "--allow-device", dev)
	v := csiclient.Volume{ID: "disk", FSType: "ext4", Context: map[string]string{"device": dev}}
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	other, otherTarget := up(t, n, "other", csiclient.Volume{FSType: "ext4"})
	n.Stop()
	file := stateFile(t, n, "static")
	mend := spoil(t, file, spoilt["newer"])
	n.Start()
	said(t, n, file)
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false), codes.FailedPrecondition, "disk", file)
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "disk", file)
	down(t, n, other.ID, otherTarget)
	n.Stop()
	mend()
	n.Start()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

func TestA10_ABadRecordOfAStageIsThatVolumesAlone(t *testing.T) {
	t.Parallel()
	for name, version := range map[string]func(string) string{
		"empty": spoilt["empty"],
		"newer": func(s string) string { return strings.Replace(s, `"version":1`, `"version":99`, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
			n.Stop()
			file := stateFile(t, n, "staged")
			spoil(t, file, version)
			bad := read(t, file)
			n.Start()
			said(t, n, file)
			other, otherTarget := up(t, n, "other", csiclient.Volume{FSType: "ext4"})
			down(t, n, other.ID, otherTarget)
			refused(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false), codes.FailedPrecondition, v.ID, "stage")
			if name == "newer" {
				refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID, file)
			}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			if kept := read(t, file+".bad"); kept != bad {
				t.Errorf("kept: %q", kept)
			}
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			down(t, n, v.ID, target)
		})
	}
}

func TestA10_ABadRecordOfADeferralIsThatVolumesAlone(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	target := n.Target("a")
	info, _, err := publishTo(t, n, v, target, false, "ext4")
	ok(t, err)
	n.Stop()
	file := stateFile(t, n, "deferred")
	spoil(t, file, spoilt["garbage"])
	bad := read(t, file)
	n.Start()
	said(t, n, file)
	other, otherTarget := up(t, n, "other", csiclient.Volume{FSType: "ext4"})
	down(t, n, other.ID, otherTarget)
	// A sandbox still has the volume, at the place that the kernel shows.
	refused(t, n.Client.Publish(ctxOf(t), v, n.Target("b"), false), codes.FailedPrecondition, "deferred", target)
	_, _, err = publishTo(t, n, v, target, false, "ext4")
	refused(t, err, codes.Unavailable, v.ID, target, file) // no code that a kubelet takes for "it is not published"
	refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "deferred", target)
	refused(t, n.Client.Delete(ctxOf(t), v.ID), codes.FailedPrecondition, "deferred")
	release := claim(t, info.Source) // as a QEMU does
	refused(t, n.Client.Unpublish(ctxOf(t), v.ID, target), codes.FailedPrecondition, "still mounted by the sandbox")
	release()
	down(t, n, v.ID, target)
	if kept := read(t, file+".bad"); kept != bad {
		t.Errorf("kept: %q", kept)
	}
	// A record that nobody got an answer for blocks nobody.
	n.Stop()
	write(t, filepath.Join(filepath.Dir(file), fmt.Sprintf("%032x.json", 7)), "")
	n.Start()
	said(t, n, fmt.Sprintf("%032x.json", 7))
}
