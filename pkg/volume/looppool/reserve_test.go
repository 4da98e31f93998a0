package looppool

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// reserving opens a pool with a reserve.
func reserving(t *testing.T, dir, name string, reserve int64, beside *Neighbours) *Pool {
	t.Helper()
	p, err := Open(Options{Name: name, Dir: filepath.Join(dir, name), NodesDir: t.TempDir(), Reserve: reserve, Neighbours: beside})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// recovered recovers pools, as the driver does once all are open.
func recovered(t *testing.T, pools ...*Pool) {
	t.Helper()
	for _, p := range pools {
		if err := p.Recover(func(volume.Source, string) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
}

// A05: what volumes were promised, no reserve takes: neither a larger one after a restart, nor that of another pool on the file system.
func TestA05_AReserveTakesNoPromisedRoom(t *testing.T) {
	const small, large = 2 << 20, 96 << 20
	for name, restart := range map[string]func(t *testing.T, dir string, beside *Neighbours) []*Pool{
		"a larger one": func(t *testing.T, dir string, beside *Neighbours) []*Pool {
			return []*Pool{reserving(t, dir, "p", large, beside)}
		},
		"of another pool": func(t *testing.T, dir string, beside *Neighbours) []*Pool {
			return []*Pool{reserving(t, dir, "q", large, beside), reserving(t, dir, "p", small, beside)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := shared(t)
			p := reserving(t, dir, "p", small, &Neighbours{})
			recovered(t, p)
			c, err := p.Capacity()
			if err != nil {
				t.Fatal(err)
			}
			if _, held := p.reserved.state(); held != small {
				t.Errorf("of a reserve of %d bytes %d are held, although nothing is promised", small, held)
			}
			v, err := p.Create(t.Context(), volume.Spec{Name: "v", Size: c.Left &^ (1<<20 - 1)}, &volume.Progress{})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			pools := restart(t, dir, &Neighbours{})
			recovered(t, pools...)
			p = pools[len(pools)-1]
			_, key, _, _ := volume.ParseID(v.ID)
			out, err := exec.Command("dd", "if=/dev/zero", "of="+p.volumePath(key), "bs=1M", "conv=notrunc,fsync", "iflag=count_bytes",
				"status=none", fmt.Sprint("count=", v.Size)).CombinedOutput()
			if err != nil {
				t.Errorf("the volume cannot be written: %v: %s", err, out)
			}
			if err := p.Delete(t.Context(), v.ID); err != nil {
				t.Fatal(err)
			}
			for _, p := range pools {
				p.refillReserve() // xfs frees the file at once: it is not open
				if size, held := p.reserved.state(); held != size {
					t.Errorf("pool %s has room now, and holds %d of its reserve of %d", p.name, held, size)
				}
			}
		})
	}
}

// A05: of two calls that saw the same spare room, such as deletions beside each other, one takes it.
func TestA05_SpareRoomIsTakenOnce(t *testing.T) {
	p := reserving(t, shared(t), "p", 4<<20, &Neighbours{})
	recovered(t, p)
	for range 3 {
		if !p.giveUpReserve() {
			t.Fatal("there is no reserve")
		}
	}
	_, seen := p.reserved.state()
	for range 2 {
		p.fillReserve(seen, reservePiece)
	}
	if _, held := p.reserved.state(); held != seen+reservePiece {
		t.Errorf("%d bytes were spare, and the reserve has taken %d", reservePiece, held-seen)
	}
}

// A05: a reserve that leaves no room would only fill the disk, on which the node may be, too.
func TestA05_AReserveThatLeavesNothingIsRefused(t *testing.T) {
	dir := shared(t)
	_, err := Open(Options{Name: "p", Dir: filepath.Join(dir, "p"), NodesDir: t.TempDir(), Reserve: 1 << 30})
	if !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "leaves nothing to promise") {
		t.Errorf("a reserve of 1 GiB on 320 MiB: %v", err)
	}
}
