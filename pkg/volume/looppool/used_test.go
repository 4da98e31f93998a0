package looppool

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// shared returns a directory on a file system of 320 MiB whose files can share extents.
func shared(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	on := filepath.Join(dir, "on")
	script := `cd "$1"; truncate -s 320M disk; mkfs.xfs -q -m reflink=1 disk; mkdir on; mount -o loop disk on`
	if out, err := exec.Command("sh", "-ec", script, "sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", on).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	return on
}

// A05: extents that files share count once, and files with very many extents do not use more
// memory.
func TestA05_SharedPiecesCountOnceInBoundedMemory(t *testing.T) {
	dir := shared(t)
	script := `cd "$1"; dd if=/dev/urandom of=a bs=64k count=128 status=none; cp --reflink=always a b
		for i in $(seq 0 2 127); do dd if=/dev/urandom of=b bs=64k count=1 seek=$i conv=notrunc status=none; done; sync a b`
	if out, err := exec.Command("sh", "-ec", script, "sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	files := []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	for _, most := range []int{mostPieces, 200, 8, 2} {
		if n, err := usedBy(files, most); err != nil || n != 12<<20 {
			t.Errorf("with %d pieces in mind: %d bytes, %v; want 12 MiB", most, n, err)
		}
	}
	for _, distinct := range []int64{100, 10_000} { // more than a union holds in memory
		u := union{most: 1000}
		for range 20 {
			for _, i := range rand.Perm(int(distinct)) {
				u.add(linux.Range{Start: int64(i) * 8192, Length: 4096})
			}
		}
		if n := u.length(); n > distinct*4096 || distinct < 1000 && n != distinct*4096 || cap(u.pieces) > 2000 {
			t.Errorf("%d pieces: %d bytes, of %d; room for %d is kept", distinct, n, distinct*4096, cap(u.pieces))
		}
	}
}

// A05: extents that a volume shares with its copy count once, also if the object between them
// was deleted, or if the pool was renamed since.
func TestA05_CopiesOfWhatIsGoneShareAllTheSame(t *testing.T) {
	dir, nodes := filepath.Join(shared(t), "pool"), t.TempDir()
	open := func(name string) *Pool {
		t.Helper()
		p, err := Open(Options{Name: name, Dir: dir, NodesDir: nodes, Log: slog.New(slog.DiscardHandler), Reserve: 1})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	const size = 16 << 20
	p := open("p")
	used := func(when string) {
		t.Helper()
		if c, err := p.Capacity(); err != nil || c.Used < size || c.Used > size+size/4 {
			t.Errorf("%s %d bytes are used, %v; want %d", when, c.Used, err, size)
		}
	}
	v, err := p.Create(t.Context(), volume.Spec{Name: "v", Size: size}, &volume.Progress{})
	if err != nil {
		t.Fatal(err)
	}
	_, key, _, _ := volume.ParseID(v.ID)
	out, err := exec.Command("dd", "if=/dev/urandom", "of="+p.volumePath(key), "bs=1M", "count=16", "conv=notrunc,fsync",
		"status=none").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s, err := p.CreateSnapshot(t.Context(), volume.SnapshotSpec{Name: "s", Volume: v.ID}, &volume.Progress{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Create(t.Context(), volume.Spec{Name: "w", Size: size, SourceSnapshot: s.ID}, &volume.Progress{}); err != nil {
		t.Fatal(err)
	}
	used("with all of them,")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = open("q")
	used("under another name,")
	if err := p.DeleteSnapshot(t.Context(), "q"+s.ID[1:]); err != nil {
		t.Fatal(err)
	}
	used("without the snapshot,")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

// A05: concurrent promises do not use the same bytes.
func TestA05_PromisesAtOnce(t *testing.T) {
	p, err := Open(Options{Name: "p", Dir: newPooled(t).dir, NodesDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	c, err := p.Capacity()
	if err != nil {
		t.Fatal(err)
	}
	var kept atomic.Int64
	var all sync.WaitGroup
	for i := range 60 {
		all.Go(func() {
			if p.promise("a volume", fmt.Sprint(i), 0, c.Left/10) == nil {
				kept.Add(1)
			}
		})
	}
	all.Wait()
	// Others use the file system too.
	if n := kept.Load(); n > 10 || n < 8 {
		t.Errorf("%d promises of a tenth each", n)
	}
}

// A05: nor do those of two pools on one file system.
func TestA05_PromisesOfTwoPoolsAtOnce(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(2, runtime.NumCPU()))) // with one, the promises follow each other
	dir, beside := newPooled(t).dir, &Neighbours{}
	var pools []*Pool
	for _, name := range []string{"p", "q"} {
		p, err := Open(Options{Name: name, Dir: filepath.Join(dir, name), NodesDir: t.TempDir(), Neighbours: beside})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		pools = append(pools, p)
	}
	for round := range 5000 {
		var kept atomic.Int64
		var both sync.WaitGroup
		for _, p := range pools {
			both.Go(func() {
				room := volume.Capacity{Total: 1 << 40, Available: 1 << 40}
				if fits, _ := p.noteIfLeft(&room, look{held: map[string]int64{}}, nil, "key", 0, room.Total*2/3); fits {
					kept.Add(1)
				}
			})
		}
		both.Wait()
		if n := kept.Load(); n != 1 {
			t.Fatalf("round %d: %d promises of two thirds each", round, n)
		}
		pools[0].unpromise("key")
		pools[1].unpromise("key")
	}
}

// A05: a pool that is away takes no room from its neighbour, and keeps what it has promised.
func TestA05_ANeighbourThatIsAway(t *testing.T) {
	dir, beside := newPooled(t).dir, &Neighbours{}
	open := func(name string) *Pool {
		p, err := Open(Options{Name: name, Dir: filepath.Join(dir, name), NodesDir: t.TempDir(), Neighbours: beside})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		return p
	}
	p, q := open("p"), open("q")
	capacity := func() volume.Capacity {
		t.Helper()
		c, err := p.Capacity()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	all := capacity()
	promised := all.Left / 2
	if err := q.promise("a volume", "key", 0, promised); err != nil {
		t.Fatal(err)
	}
	near := func(got, want int64) bool { return got > want-want/20 && got < want+want/20 } // others use the disk
	for _, away := range []string{"moved", "another directory"} {
		if away == "moved" {
			if err := os.Rename(q.dir, q.dir+"-moved"); err != nil {
				t.Fatal(err)
			}
		} else if err := os.MkdirAll(filepath.Join(q.dir, "volumes"), 0o700); err != nil {
			t.Fatal(err)
		}
		if got := capacity(); !near(got.Left, all.Left-promised) {
			t.Errorf("%s: %d were left, the neighbour has promised %d, and %d are left", away, all.Left, promised, got.Left)
		}
		if err := p.promise("a volume", "small", 0, 1<<20); err != nil {
			t.Errorf("%s: %v", away, err)
		}
		if err := p.promise("a volume", "large", 0, all.Left-promised/2); err == nil || !strings.Contains(err.Error(), "(q)") {
			t.Errorf("%s: what the neighbour has promised is promised again: %v", away, err)
		}
	}
}
