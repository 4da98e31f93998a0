package looppool

import (
	"crypto/rand"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// btrfsMount returns the directory at which it has mounted a file system of 1 GiB.
func btrfsMount(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	on := filepath.Join(dir, "on")
	script := `cd "$1"; truncate -s 1G disk; mkfs.btrfs -q disk; mkdir on; mount -o "loop,$2" disk on`
	if out, err := exec.Command("sh", "-ec", script, "sh", dir, options).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", on).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	return on
}

func openOnBtrfs(t *testing.T, name, dir string, beside *Neighbours) *Pool {
	t.Helper()
	p, err := Open(Options{Name: name, Dir: dir, NodesDir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Reserve: 1 << 20,
		Neighbours: beside})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// onBtrfs opens a pool on a file system of 1 GiB.
func onBtrfs(t *testing.T, options string) *Pool {
	t.Helper()
	return openOnBtrfs(t, "p", filepath.Join(btrfsMount(t, options), "pool"), nil)
}

// A05: subvolumes have device numbers of their own, and share the room of their file system.
func TestA05_PoolsOnSubvolumesShareTheirRoom(t *testing.T) {
	on, beside := btrfsMount(t, "defaults"), &Neighbours{}
	var pools []*Pool
	for _, name := range []string{"p", "q"} {
		dir := filepath.Join(on, name)
		if out, err := exec.Command("btrfs", "subvolume", "create", dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		pools = append(pools, openOnBtrfs(t, name, dir, beside))
	}
	c, err := pools[0].Capacity()
	if err != nil {
		t.Fatal(err)
	}
	if err := pools[0].promise("a volume", "key", 0, c.Left*2/3); err != nil {
		t.Fatal(err)
	}
	if err := pools[1].promise("a volume", "key", 0, c.Left*2/3); err == nil {
		t.Errorf("of %d bytes, two pools have each promised two thirds", c.Left)
	}
}

// attached makes a volume, and calls change before it is attached. At the end of the test the volume is deleted.
func attached(t *testing.T, p *Pool, size int64, change func(img string)) mounter.Device {
	t.Helper()
	v, err := p.Create(t.Context(), volume.Spec{Name: "v", Size: size}, &volume.Progress{})
	if err != nil {
		t.Fatal(err)
	}
	_, key, _, _ := volume.ParseID(v.ID)
	change(p.volumePath(key))
	a, err := p.Attach(t.Context(), v.ID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.Detach(t.Context(), v.ID), p.Delete(t.Context(), v.ID)); err != nil {
			t.Error(err)
		}
	})
	return a.Device
}

// A05: btrfs keeps an extent while one block of it is in use. One pod with a small volume must not fill the pool by that.
func TestA05_ATenantCannotFillAPoolOnBtrfs(t *testing.T) {
	p := onBtrfs(t, "rw")
	// btrfs compresses what is made in a directory with this flag, and takes no file that is compressed and overwritten in place.
	if out, err := exec.Command("chattr", "+c", filepath.Join(p.dir, "volumes")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	d := attached(t, p, 16<<20, func(string) {})
	f, err := linux.Open(d.Path, os.O_RDWR|linux.ODirect)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const written = 1 << 20
	b := linux.AlignedBuffer(written)
	if _, err := rand.Read(b); err != nil { // what does not compress
		t.Fatal(err)
	}
	for i := range int64(600) { // each leaves one block of the one before it
		if _, err := f.WriteAt(b, i*4096); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	c, err := p.Capacity()
	if err != nil {
		t.Fatal(err)
	}
	if taken := c.Total - c.Available; taken > 256<<20 {
		t.Errorf("a volume of 16 MiB takes %d MiB of the pool", taken>>20)
	}
}

// A05: what files take counts as room. On a file system that compresses, the size of their content is not what they take.
func TestA05_APoolThatCompressesPromisesNoMoreThanItHas(t *testing.T) {
	p := onBtrfs(t, "compress-force=zstd")
	empty, err := p.Capacity()
	if err != nil {
		t.Fatal(err)
	}
	const size = 256 << 20
	d := attached(t, p, size, func(img string) { // as v0.1.0 made it
		if err := errors.Join(os.Remove(img), os.WriteFile(img, nil, 0o600), os.Truncate(img, size)); err != nil {
			t.Fatal(err)
		}
	})
	script := `yes "a pod writes text that is easy to compress" | head -c "$2" | dd of="$1" bs=1M iflag=fullblock conv=fsync status=none; sync -f "$3"`
	if out, err := exec.Command("sh", "-ec", script, "sh", d.Path, "268435456", p.dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	c, err := p.Capacity()
	if err != nil {
		t.Fatal(err)
	}
	if c.Promised+c.Left > empty.Left+16<<20 {
		t.Errorf("%d MiB are promised and %d are left to promise, of a disk of %d", c.Promised>>20, c.Left>>20, c.Total>>20)
	}
}
