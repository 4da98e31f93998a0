package mounter_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

// The life of a mount.
func Example() {
	device, kubelet, end := exampleDevice() // an ext4 on a loop device, and a directory like the kubelet's
	defer end()

	root, err := mounter.OpenRoot(kubelet)
	check(err)
	defer root.Close()
	target, err := root.Target(filepath.Join(kubelet, "mount"))
	check(err)
	defer target.Close()

	// Nobody sees this mount yet.
	m, err := mounter.Open(mounter.Filesystem{Device: device, Type: "ext4"})
	check(err)
	defer m.Close()
	check(m.Change(mounter.View{ReadOnly: true}))

	check(m.Attach(target))
	check(m.Close()) // an open mount keeps the file system in use

	state, err := target.Look()
	check(err)
	seen, err := state.Mount()
	check(err)
	shown, _, err := state.Device()
	check(err)
	fmt.Println(seen.Type, "read-only:", seen.ReadOnly, "superblock:", seen.ReadOnlySB, "ours:", shown.Same(device))
	state.Close()

	check(target.Unmount())
	check(target.Remove())
	// Output: ext4 read-only: true superblock: false ours: true
}

func exampleDevice() (d mounter.Device, kubelet string, end func()) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	check(err)
	kubelet = filepath.Join(dir, "kubelet")
	check(os.Mkdir(kubelet, 0o755))
	pool, err := looppool.Open(looppool.Options{Name: "pool", Dir: filepath.Join(dir, "pool"), NodesDir: dir})
	check(err)
	v, err := pool.Create(ctx, volume.Spec{Name: "data", Size: 64 << 20}, &volume.Progress{})
	check(err)
	a, err := pool.Attach(ctx, v.ID)
	check(err)
	_, blank, err := volume.ProveBlank(ctx, pool, v.ID, a.Device, &volume.Progress{})
	check(err)
	check(fsprogs.New(nil).Format(ctx, blank, "ext4", false))
	return a.Device, kubelet, func() {
		check(pool.Detach(ctx, v.ID))
		check(pool.Close())
		check(os.RemoveAll(dir))
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
