package dirpool

import (
	"log/slog"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/volumetest"
)

func TestPool(t *testing.T) {
	nodes := t.TempDir()
	volumetest.TestPool(t, func(t testing.TB, dir string) volume.Pool {
		p, err := Open(volumetest.Name, dir, nodes, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
}
