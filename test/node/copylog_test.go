package node

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A power loss leaves the file system of a volume with a log: what was fsynced last is nowhere else. A copy that is made before the volume
// is mounted again has it, too.
func TestD09_ACopyOfAVolumeWithALogHasWhatWasSynced(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			n := testnode.New(t, "")
			v, target := up(t, n, "origin", csiclient.Volume{FSType: fs})
			write(t, target+"/old", "old")
			run(t, "sync", "-f", target)
			write(t, target+"/f", "precious")
			run(t, "sync", target+"/f") // fsync
			imgs, err := filepath.Glob(n.PoolDir() + "/volumes/*.img")
			ok(t, err)
			if len(imgs) != 1 {
				t.Fatal(imgs)
			}
			run(t, "cp", "--sparse=always", imgs[0], n.Dir+"/crash") // what a power loss leaves
			away := func(id, target string) {
				ok(t, n.Client.Unpublish(ctxOf(t), id, target))
				ok(t, n.Client.Unstage(ctxOf(t), id))
			}
			away(v.ID, target)
			run(t, "dd", "if="+n.Dir+"/crash", "of="+imgs[0], "bs=1M", "conv=notrunc,fsync", "status=none")
			ok(t, os.Remove(n.Dir+"/crash"))

			clone, err := n.Client.Create(ctxOf(t), "clone", 0, csiclient.Volume{FSType: fs}, nil, &csi.VolumeContentSource{
				Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.ID}}})
			ok(t, err)
			c := csiclient.Volume{ID: clone.GetVolumeId(), FSType: fs}
			ok(t, n.Client.Stage(ctxOf(t), c))
			ok(t, n.Client.Publish(ctxOf(t), c, n.Target("clone"), false))
			if got := read(t, n.Target("clone")+"/f"); got != "precious" {
				t.Errorf("the clone holds %q", got)
			}
			// The origin beside it.
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			if got := read(t, target+"/f"); got != "precious" {
				t.Errorf("the origin holds %q", got)
			}
			down(t, n, c.ID, n.Target("clone"))
			down(t, n, v.ID, target)
		})
	}
}
