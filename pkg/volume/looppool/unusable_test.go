package looppool

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// reopened opens a pool's directory again after its records were changed.
func reopened(t *testing.T, p *Pool, change func(dir string)) *Pool {
	t.Helper()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	change(p.dir)
	p, err := Open(Options{Name: p.name, Dir: p.dir, NodesDir: p.loop.Dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// rewrite replaces a text in a file.
func rewrite(t *testing.T, path, old, next string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(b, []byte(old)) {
		t.Fatalf("%s has no %q: %s", path, old, b)
	}
	if err := os.WriteFile(path, bytes.Replace(b, []byte(old), []byte(next), 1), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A05: a volume whose record cannot be used keeps its room: its pod goes on writing.
func TestA05_AnUnusableRecordKeepsItsPromise(t *testing.T) {
	const size = 200 << 20
	p, err := Open(Options{Name: "p", Dir: filepath.Join(shared(t), "pool"), NodesDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	v, err := p.Create(t.Context(), volume.Spec{Name: "v", Size: size}, nil)
	if err != nil {
		t.Fatal(err)
	}
	before, err := p.Capacity()
	if err != nil {
		t.Fatal(err)
	}
	_, key, _, _ := volume.ParseID(v.ID)
	p = reopened(t, p, func(dir string) {
		rewrite(t, filepath.Join(dir, "volumes", key+".json"), `"version": 2`, `"version": 3`)
	})
	after, err := p.Capacity()
	if err != nil {
		t.Fatal(err)
	}
	if after.Promised != before.Promised || after.Left > before.Left+1<<20 {
		t.Errorf("promised %d, and %d are left; before, %d and %d", after.Promised, after.Left, before.Promised, before.Left)
	}
	if _, err := p.Create(t.Context(), volume.Spec{Name: "w", Size: size}, nil); !fault.Is(err, fault.NoSpace) {
		t.Errorf("its room is promised again: %v", err)
	}
	if _, err := p.Create(t.Context(), volume.Spec{Name: "small", Size: 1 << 20}, nil); err != nil {
		t.Error(err)
	}
}

// D06: the record of a copy that froze its volume cannot be used. The volume is thawed all the same, and no other if the record tells
// which.
func TestD06_AFreezeEndsThoughTheCopysRecordCannotBeUsed(t *testing.T) {
	for how, change := range map[string][2]string{
		"newer":               {`"version": 1`, `"version": 2`},
		"an unknown field":    {`"sizeBytes"`, `"more": 1, "sizeBytes"`},
		"nothing is told":     {`"data"`, `"date"`},
		"ready":               {`"state": "creating"`, `"state": "ready", "more": 1`},
		"a state of tomorrow": {`"state": "creating"`, `"state": "filling"`},
	} {
		t.Run(how, func(t *testing.T) {
			p, v := withVolume(t)
			other, err := p.Create(t.Context(), volume.Spec{Name: "other", Size: 1 << 20}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := snapshotOf(t, p, v, "s", nil); err != nil {
				t.Fatal(err)
			}
			_, key, _, _ := volume.ParseID(volume.SnapshotID("p", "s"))
			p = reopened(t, p, func(dir string) {
				file := filepath.Join(dir, "snapshots", key+".json")
				rewrite(t, file, `"state": "ready"`, `"state": "creating"`)
				rewrite(t, file, change[0], change[1])
			})
			want := []string{v.ID}
			switch how {
			case "ready":
				want = nil
			case "nothing is told":
				want = append(want, other.ID)
			}
			w := &thaws{err: errors.New("the disk does not answer")}
			for _, err := range []error{w.err, nil} { // the second time, the health of the volume thaws it
				w.of, w.err = nil, err
				if err := p.Recover(w.thaw); err != nil {
					t.Fatal(err)
				}
				slices.Sort(w.of)
				slices.Sort(want)
				if !slices.Equal(w.of, want) {
					t.Errorf("thawed: %q, want %q", w.of, want)
				}
				if got := isFrozen(p, v.ID); got != (err != nil && want != nil) {
					t.Errorf("frozen by its health: %t", got)
				}
			}
			if !exists(p.snapshotPath(key)) {
				t.Error("the copy whose record cannot be used was removed")
			}
		})
	}
}

// D06: a thaw that is older than a freeze does not count for it.
func TestD06_AVolumeThatFreezesAgainIsThawedAgain(t *testing.T) {
	p, v := withVolume(t)
	w := &thaws{}
	if err := p.Recover(w.thaw); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(stuck(t, p, v, w)); err != nil {
		t.Fatal(err)
	}
	// The next copy removes what is left of the first, slowly. Meanwhile another copy cannot be resumed.
	begun, goOn, looked := make(chan struct{}), make(chan struct{}), make(chan struct{})
	p.mu.Lock()
	forget := p.frozen[v.ID].copies[0].forget
	p.frozen[v.ID].copies[0].forget = func() error { close(begun); <-goOn; return forget() }
	p.mu.Unlock()
	var settled error
	go func() { settled = p.settle(v.ID, ""); close(looked) }()
	<-begun
	if _, err := snapshotOf(t, p, v, "another", errors.New("not thawed either")); err == nil {
		t.Fatal("the other copy was resumed")
	}
	close(goOn)
	<-looked
	if !fault.Is(settled, fault.Unavailable) {
		t.Errorf("the volume may be frozen, and a copy may be made: %v", settled)
	}
	if isFrozen(p, v.ID) || w.count() != 2 {
		t.Errorf("%d thaws, and its health says frozen: %t", w.count(), isFrozen(p, v.ID))
	}
}
