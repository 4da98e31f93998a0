package poolhome_test

import (
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
	"github.com/crust-csi/crust-csi/pkg/volume/volumetest"
)

func TestPool(t *testing.T) {
	nodes := t.TempDir()
	volumetest.TestPool(t, func(t testing.TB, dir string) volume.Pool {
		at := filepath.Join(dir, "pool")
		p, err := poolhome.Open(poolhome.Options{
			Name: volumetest.Name, Dir: at, State: filepath.Join(dir, "state"), Empty: looppool.Empty,
			Open: func() (volume.Pool, error) {
				return looppool.Open(looppool.Options{Name: volumetest.Name, Dir: at, NodesDir: nodes})
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
}
