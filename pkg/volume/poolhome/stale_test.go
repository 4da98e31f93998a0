package poolhome_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
)

// The pool's disk goes while the driver runs, is used elsewhere (another machine, another csi-node), and comes back as another block
// device. What the driver remembers of its volumes is not what they are now.
func TestB03_APoolThatComesBackWasUsedElsewhere(t *testing.T) {
	dir, nodes := t.TempDir(), t.TempDir()
	at := filepath.Join(dir, "pool")
	p, err := poolhome.Open(poolhome.Options{
		Name: "pool", Dir: at, State: filepath.Join(dir, "state"), Empty: looppool.Empty,
		Open: func() (volume.Pool, error) {
			return looppool.Open(looppool.Options{Name: "pool", Dir: at, NodesDir: nodes})
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Recover(func(volume.Source, string) error { return nil }); err != nil {
		t.Fatal(err)
	}
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
	_, key, _, _ := volume.ParseID(v.ID)
	data := []byte("somebody's data, in the middle of a raw volume")
	f, err := os.OpenFile(filepath.Join(elsewhere, "volumes", key+".img"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	// mkfs.ext4 writes here, and the probe of 64 samples does not look here
	const off = 5<<20 + 4096
	if _, err := f.WriteAt(data, off); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	// It is back.
	if err := os.Rename(elsewhere, at); err != nil {
		t.Fatal(err)
	}
	now, err := p.Get(v.ID)
	if err != nil {
		t.Logf("refused: %v", err)
		return
	}
	if !now.Facts.GivenRaw {
		t.Errorf("the volume was given raw, and that is on record in the pool, and is not known: %+v", now.Facts)
	}
	t.Logf("usable: %v", p.Usable())
	a, err := p.Attach(t.Context(), v.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := volume.EnsureFilesystem(t.Context(), p, v.ID, a.Device, "ext4", fsprogs.New(nil), nil); err == nil {
		t.Errorf("it was formatted")
	}
	got := make([]byte, len(data))
	d, err := os.Open(a.Device.Path)
	if err == nil {
		_, err = d.ReadAt(got, off)
		d.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, data) {
		t.Logf("and its data is overwritten")
	}
	if err := p.Detach(t.Context(), v.ID); err != nil {
		t.Error(err)
	}
	// The directory is locked by nobody.
	again, err := looppool.Open(looppool.Options{Name: "pool", Dir: at, NodesDir: nodes})
	if err == nil {
		t.Errorf("another process can open the pool that is in use")
		again.Close()
	}
}
