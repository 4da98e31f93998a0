package looppool

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// thaws is a Thaw that a test scripts.
type thaws struct {
	mu    sync.Mutex
	err   error
	hang  chan struct{}
	panic bool
	of    []string
}

func (w *thaws) thaw(_ volume.Source, id string) error {
	w.mu.Lock()
	err, hang, panics := w.err, w.hang, w.panic
	w.of = append(w.of, id)
	w.mu.Unlock()
	if hang != nil {
		<-hang
	}
	if panics {
		panic("in thaw")
	}
	return err
}

func (w *thaws) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.of)
}

// unresumed takes a snapshot whose volume cannot be resumed.
func unresumed(t *testing.T, p *Pool, v volume.Volume) {
	t.Helper()
	_, err := snapshotOf(t, p, v, "s", errors.New("not thawed"))
	if !errors.Is(err, errNotResumed) {
		t.Fatalf("the snapshot: %v", err)
	}
}

// stuck takes a snapshot whose volume cannot be resumed, and whose file cannot be removed: a directory that is not empty is in its place.
// The volume is thawed then.
func stuck(t *testing.T, p *Pool, v volume.Volume, w *thaws) (img string) {
	t.Helper()
	_, key, _, _ := volume.ParseID(volume.SnapshotID("p", "s"))
	img = p.snapshotPath(key)
	stay := func() error {
		return errors.Join(os.Remove(img), os.MkdirAll(img+"/x", 0o700), errors.New("not thawed"))
	}
	_, err := p.CreateSnapshot(t.Context(), volume.SnapshotSpec{Name: "s", Volume: v.ID,
		Quiesce: func(context.Context) (volume.Stillness, error) { return volume.Stillness{Resume: stay}, nil }}, &volume.Progress{})
	if !errors.Is(err, errNotResumed) || w.count() != 1 {
		t.Fatalf("the snapshot: %v, after %d thaws", err, w.count())
	}
	return img
}

func snapshotOf(t *testing.T, p *Pool, v volume.Volume, name string, resume error) (volume.Snapshot, error) {
	t.Helper()
	return p.CreateSnapshot(t.Context(), volume.SnapshotSpec{Name: name, Volume: v.ID,
		Quiesce: func(context.Context) (volume.Stillness, error) {
			return volume.Stillness{Resume: func() error { return resume }}, nil
		}}, &volume.Progress{})
}

func isFrozen(p *Pool, id string) bool {
	for _, a := range p.Health(id) {
		if a.Reason == "Frozen" {
			return true
		}
	}
	return false
}

// D06: what is left of a copy is removed when it can be. The volume is thawed once, and works meanwhile: a freeze that somebody else
// makes later is theirs.
func TestD06_AVolumeIsThawedOnceThoughItsCopyCannotBeRemoved(t *testing.T) {
	p, v := withVolume(t)
	w := &thaws{}
	if err := p.Recover(w.thaw); err != nil {
		t.Fatal(err)
	}
	img := stuck(t, p, v, w)
	for range 2 {
		if isFrozen(p, v.ID) || w.count() != 1 {
			t.Errorf("a volume that was thawed counts as frozen, after %d thaws", w.count())
		}
	}
	if _, err := snapshotOf(t, p, v, "another", nil); err != nil {
		t.Errorf("another snapshot of it: %v", err)
	}
	if _, err := snapshotOf(t, p, v, "s", nil); !fault.Is(err, fault.Unavailable) {
		t.Errorf("the snapshot of which something is left: %v", err)
	}
	if err := os.RemoveAll(img); err != nil {
		t.Fatal(err)
	}
	if _, err := snapshotOf(t, p, v, "s", nil); err != nil || len(p.frozen) > 0 {
		t.Errorf("the snapshot of which nothing is left: %v, and %d volumes may be frozen", err, len(p.frozen))
	}
}

// D06: a volume that cannot be thawed is not released, because it holds its device. Nothing shows that.
func TestD06_AFrozenVolumeIsThawedBeforeItsDeviceIsReleased(t *testing.T) {
	p, v := withVolume(t)
	w := &thaws{err: errors.New("no answer")}
	if err := p.Recover(w.thaw); err != nil {
		t.Fatal(err)
	}
	unresumed(t, p, v)
	if err := p.Detach(t.Context(), v.ID); !fault.Is(err, fault.Unavailable) {
		t.Errorf("detach of a frozen volume: %v", err)
	}
	w.err = nil
	if err := p.Detach(t.Context(), v.ID); err != nil || isFrozen(p, v.ID) {
		t.Errorf("detach of a volume that can be thawed: %v", err)
	}
}

// D06, A07: the next process thaws the volume, under the pool's name of now.
func TestD06_ARenamedPoolThawsItsVolumes(t *testing.T) {
	p, v := withVolume(t)
	w := &thaws{err: errors.New("no answer")}
	if err := p.Recover(w.thaw); err != nil {
		t.Fatal(err)
	}
	unresumed(t, p, v)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p, err := Open(Options{Name: "new", Dir: p.dir, NodesDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	again := &thaws{}
	if err := p.Recover(again.thaw); err != nil || !slices.Equal(again.of, []string{volume.VolumeID("new", "v")}) {
		t.Errorf("thawed: %v, %v", again.of, err)
	}
	if n := len(p.snapshots.All()); n > 0 {
		t.Errorf("%d snapshots are left", n)
	}
}

// D06: a thaw that hangs, or panics, holds up nothing but its volume.
func TestD06_AThawThatHangsHoldsUpItsVolumeOnly(t *testing.T) {
	p, v := withVolume(t)
	w := &thaws{err: errors.New("no answer")}
	if err := p.Recover(w.thaw); err != nil {
		t.Fatal(err)
	}
	unresumed(t, p, v)
	w.hang, w.err, p.thawPatience = make(chan struct{}), nil, time.Nanosecond
	if err := p.Recover(w.thaw); err != nil {
		t.Fatal(err)
	}
	for w.count() < 2 { // Recover gives up before the thaw begins
		time.Sleep(time.Millisecond)
	}
	if _, err := snapshotOf(t, p, v, "s", nil); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a snapshot meanwhile: %v", err)
	}
	if _, err := p.Create(t.Context(), volume.Spec{Name: "other", Size: 1 << 20}, &volume.Progress{}); err != nil {
		t.Errorf("another volume meanwhile: %v", err)
	}
	close(w.hang)
	for begin := time.Now(); isFrozen(p, v.ID); time.Sleep(time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatal("it is frozen although the thaw has ended")
		}
	}
}

// D06: a thaw that panics is tried again.
func TestD06_AThawThatPanicsIsTriedAgain(t *testing.T) {
	p, v := withVolume(t)
	w := &thaws{err: errors.New("no answer")}
	if err := p.Recover(w.thaw); err != nil {
		t.Fatal(err)
	}
	unresumed(t, p, v)
	w.panic = true
	func() {
		defer func() { _ = recover() }()
		isFrozen(p, v.ID)
		t.Error("there was no panic")
	}()
	w.panic, w.err = false, nil
	if isFrozen(p, v.ID) {
		t.Error("it is frozen although a thaw works")
	}
}
