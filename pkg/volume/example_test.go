package volume_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

// A volume is made and attached. Its device may be formatted, because nobody has had it. Then
// the volume is deleted again.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "pool")
	check(err)
	defer os.RemoveAll(dir)
	pool, err := looppool.Open(looppool.Options{Name: "pool", Dir: dir, NodesDir: dir})
	check(err)
	defer pool.Close()

	v, err := pool.Create(ctx, volume.Spec{Name: "data", Size: 64 << 20, FSType: "xfs"}, &volume.Progress{})
	check(err)
	a, err := pool.Attach(ctx, v.ID)
	check(err)
	found, proof, err := volume.ProveBlank(ctx, pool, v.ID, a.Device, &volume.Progress{})
	check(err)
	fmt.Println(v.Size, found.Content, proof.Path() == a.Device.Path)

	check(pool.Detach(ctx, v.ID))
	check(pool.Delete(ctx, v.ID))
	_, err = pool.Get(v.ID)
	fmt.Println(err != nil)
	// Output:
	// 67108864 blank true
	// true
}

// A pod reads a volume as a raw block device. The driver knows by the target whose device is there: each AttachReadOnly makes another one.
func Example_rawBlock() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "raw")
	check(err)
	defer os.RemoveAll(dir)
	kubelet := filepath.Join(dir, "kubelet")
	check(os.Mkdir(kubelet, 0o755))
	pool, err := looppool.Open(looppool.Options{Name: "pool", Dir: filepath.Join(dir, "pool"), NodesDir: dir})
	check(err)
	defer pool.Close()
	root, err := mounter.OpenRoot(kubelet)
	check(err)
	defer root.Close()

	// Stage.
	v, err := pool.Create(ctx, volume.Spec{Name: "data", Size: 64 << 20, Block: true}, nil)
	check(err)
	_, err = pool.Attach(ctx, v.ID)
	check(err)
	v.Facts.GivenRaw = true
	check(pool.SetFacts(v.ID, v.Facts))

	// Publish, and publish again.
	target, err := root.Target(filepath.Join(kubelet, "device"))
	check(err)
	defer target.Close()
	for range 2 {
		if shown, ours := whose(pool, target, v.ID); ours {
			fmt.Println("it is there, read-only:", mounter.ReadOnlyDevice(shown))
			continue
		}
		d, err := pool.AttachReadOnly(ctx, v.ID)
		check(err)
		d, err = pool.ForPod(ctx, v.ID, d)
		check(err)
		m, err := mounter.OpenDevice(d)
		check(err)
		check(m.Attach(target))
		check(m.Close())
	}

	// Unpublish: the other readers' devices would stay, if there were any.
	shown, ours := whose(pool, target, v.ID)
	if ours {
		check(target.Clear(shown))
	}
	check(pool.DetachReadOnly(ctx, v.ID, nil))

	// Unstage: Detach does not see what targets show, so the driver looks before.
	_, published := whose(pool, target, v.ID)
	fmt.Println("it is published:", published)
	check(pool.Detach(ctx, v.ID))
	// Output:
	// it is there, read-only: true
	// it is published: false
}

// whose returns the device at a target, and whether it is the volume's.
func whose(source volume.Source, target *mounter.Target, id string) (d mounter.Device, ours bool) {
	state, err := target.Look()
	check(err)
	defer state.Close()
	d, ok, err := state.Device()
	check(err)
	if !ok {
		return d, false
	}
	owner, ok, err := source.Owns(d)
	check(err)
	return d, ok && owner == id
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
