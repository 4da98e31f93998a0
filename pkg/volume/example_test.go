package volume_test

import (
	"context"
	"fmt"
	"os"

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

func check(err error) {
	if err != nil {
		panic(err)
	}
}
