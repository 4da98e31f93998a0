package node

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// onVolume runs f on a mount of the volume's device that is not the driver's.
func onVolume(t *testing.T, n *testnode.Node, id string, f func(dir string)) {
	t.Helper()
	dir := t.TempDir()
	run(t, "mount", loopDevice(t, image(n, id)), dir)
	defer testnode.Unmount(t, dir)
	f(dir)
}

// onDisk returns a volume's record, and how many files have the group on disk or not.
func onDisk(t *testing.T, n *testnode.Node, id string, gid uint32) (record string, right, wrong int) {
	t.Helper()
	onVolume(t, n, id, func(dir string) {
		buf := make([]byte, 256)
		size, err := syscall.Getxattr(dir, ownership.Attribute, buf)
		if err == nil {
			record = string(buf[:size])
		}
		ok(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			ok(t, err)
			if _, have := owner(t, path); have == gid {
				right++
			} else {
				wrong++
			}
			return nil
		}))
	})
	return record, right, wrong
}

// F04: the volume itself records that a walk was interrupted, wherever that was. The next publish
// finishes the walk, under either strategy. The root alone proves nothing, because it may already
// have the group.
func TestF04_KilledInMidWalk(t *testing.T) {
	t.Parallel()
	const files = 500
	for _, strategy := range []string{"chown", "idmap"} {
		t.Run(strategy, func(t *testing.T) {
			n := testnode.New(t, "failpoint")
			v := with(create(t, n, "a", csiclient.Volume{FSType: "ext4"}), "4242", "fsGroupStrategy", strategy)
			always := with(v, "4242", "fsGroupChangePolicy", "Always")
			target := n.Target("a")
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), with(v, ""), target, false))
			fillTree(t, target, files)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			for _, point := range []string{"ownership.change", "ownership.change#200", "ownership.walked"} {
				for _, rootIsRight := range []bool{false, true} {
					where := fmt.Sprintf("killed at %s, root right: %v", point, rootIsRight)
					onVolume(t, n, v.ID, func(dir string) {
						run(t, "chgrp", "-hR", "0", dir)
						if rootIsRight {
							run(t, "chgrp", "4242", dir)
							run(t, "chmod", "2770", dir)
						}
					})
					n.Kill()
					n.Env = []string{"CRUST_FAILPOINT=" + point}
					n.Start()
					if err := n.Client.Publish(ctxOf(t), always, target, false); err == nil {
						t.Fatalf("%s was not passed", point)
					}
					_ = n.Wait()
					record, right, wrong := onDisk(t, n, v.ID, 4242)
					if !strings.HasSuffix(record, "group=4242 state=dirty") {
						t.Errorf("%s: the record on the volume is %q", where, record)
					}
					switch {
					case point == "ownership.change" && wrong < files, point == "ownership.walked" && wrong > 0:
						t.Errorf("%s: %d files have the group, %d have not", where, right, wrong)
					case point == "ownership.change#200" && (wrong == 0 || right < 190):
						t.Errorf("%s: %d files have the group, %d have not", where, right, wrong)
					}
					n.Env = nil
					n.Start()
					ok(t, n.Client.Publish(ctxOf(t), v, target, false))
					ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
					record, _, wrong = onDisk(t, n, v.ID, 4242)
					if wrong > 0 || !strings.HasSuffix(record, "group=4242 state=clean") {
						t.Errorf("%s: after the next publish %d files have another group, and the record is %q", where, wrong, record)
					}
				}
			}
			down(t, n, v.ID)
		})
	}
}
