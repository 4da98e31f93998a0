package poolhome

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

// What a crash has left and cannot be removed concerns nobody else: the pool's other volumes are available.
func TestD11_ALeftoverThatStaysAffectsOnlyItself(t *testing.T) {
	for _, state := range []string{"deleting", "creating"} {
		t.Run(state, func(t *testing.T) {
			dir, known, nodes := t.TempDir(), t.TempDir(), t.TempDir()
			open := func() *Pool {
				p, err := Open(Options{Name: "p", Dir: dir, State: known, Open: func() (volume.Pool, error) {
					return looppool.Open(looppool.Options{Name: "p", Dir: dir, NodesDir: nodes, Log: slog.New(slog.DiscardHandler)})
				}})
				if err != nil {
					t.Fatal(err)
				}
				return p
			}
			p := open()
			good, err := p.Create(t.Context(), volume.Spec{Name: "good", Size: 1 << 20}, nil)
			if err != nil {
				t.Fatal(err)
			}
			left, err := p.Create(t.Context(), volume.Spec{Name: "left", Size: 1 << 20}, nil)
			if err != nil {
				t.Fatal(err)
			}
			p.Close()
			_, key, _, _ := volume.ParseID(left.ID)
			file := filepath.Join(dir, "volumes", key)
			b, err := os.ReadFile(file + ".json")
			if err == nil {
				next := strings.Replace(string(b), `"state": "ready"`, `"state": "`+state+`"`, 1)
				err = os.WriteFile(file+".json", []byte(next), 0o600)
			}
			if err == nil {
				err = os.Remove(file + ".img")
			}
			if err == nil {
				err = os.MkdirAll(file+".img/x", 0o700) // it cannot be removed
			}
			if err != nil {
				t.Fatal(err)
			}
			p = open()
			defer p.Close()
			if err := p.Recover(func(volume.Source, string) error { return nil }); err != nil {
				t.Error(err)
			}
			if _, err := p.Get(good.ID); err != nil {
				t.Errorf("another volume: %v", err)
			}
			if err := os.RemoveAll(file + ".img"); err != nil {
				t.Fatal(err)
			}
			if err := p.Delete(t.Context(), left.ID); err != nil {
				t.Error(err)
			}
			if got := p.List(); len(got) != 1 {
				t.Errorf("%+v", got)
			}
		})
	}
}
