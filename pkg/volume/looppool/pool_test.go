package looppool_test

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/volumetest"
)

func TestPool(t *testing.T) {
	nodes := t.TempDir()
	volumetest.TestPool(t, func(t testing.TB, dir string) volume.Pool {
		p, err := looppool.Open(looppool.Options{Name: volumetest.Name, Dir: dir, NodesDir: nodes})
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
}
