package poolhome_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
)

// The pool's disk goes while the driver runs, is used elsewhere (another machine, another csi-node), and comes back as another block
// device. What the driver remembers of its volumes is not what they are now.
func TestB03_APoolThatComesBackWasUsedElsewhere(t *testing.T) {
	dir, nodes := t.TempDir(), t.TempDir()
	at := filepath.Join(dir, "pool")
	open := func() *poolhome.Pool {
		t.Helper()
		p, err := poolhome.Open(poolhome.Options{
			Name: "pool", Dir: at, State: filepath.Join(dir, "state"), Empty: looppool.Empty,
			Open: func() (volume.Pool, error) {
				return looppool.Open(looppool.Options{Name: "pool", Dir: at, NodesDir: nodes})
			},
		})
		if err == nil {
			err = p.Recover(func(volume.Source, string) error { return nil })
		}
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := open()
	v, err := p.Create(t.Context(), volume.Spec{Name: "v", Size: 64 << 20, FSType: "ext4"}, &volume.Progress{})
	if err != nil {
		t.Fatal(err)
	}
	// The disk is away, and its content is served elsewhere. A copy stands for the disk under another device number.
	elsewhere := filepath.Join(dir, "elsewhere")
	if out, err := exec.Command("cp", "-a", "--sparse=always", at, elsewhere).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Rename(at, at+".unplugged"); err != nil {
		t.Fatal(err)
	}
	if err := p.Away(); err == nil {
		t.Fatal("not away")
	}
	other, err := looppool.Open(looppool.Options{Name: "pool", Dir: elsewhere, NodesDir: nodes})
	if err != nil {
		t.Fatal(err)
	}
	facts := v.Facts
	facts.GivenRaw = true
	if err := other.SetFacts(v.ID, facts); err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	// It is back.
	if err := os.Rename(elsewhere, at); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Get(v.ID); !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "restart the driver") {
		t.Errorf("what the driver remembers is served: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	again := open()
	defer again.Close()
	if now, err := again.Get(v.ID); err != nil || !now.Facts.GivenRaw {
		t.Errorf("after a restart: %+v, %v", now.Facts, err)
	}
}
