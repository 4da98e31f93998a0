package driver

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// silent is a pool whose disk hangs until it is released.
type silent struct {
	volume.Pool
	name   string
	answer chan struct{}
	asked  int
}

func (*silent) Sizes() volume.Sizes { return volume.FileSizes() }

// A caller that leaves early does not make a pool's disk sick. Until it is known to hang, few
// callers ask it at once.
func TestD11_ACallersHasteIsNoSickDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &silent{name: "slow", answer: make(chan struct{})}
		log := slog.New(slog.DiscardHandler)
		d := &Driver{Config: Config{Log: log}, readers: newReaders(log)}
		var asked atomic.Int32
		ask := func(ctx context.Context) error {
			_, err := askPool(ctx, d, p, func() (int, error) { asked.Add(1); <-p.answer; return 1, nil })
			return err
		}
		hasty, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := ask(hasty); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "pool slow") {
			t.Errorf("who has no time is told %v", err)
		}
		patient := make(chan error, 1)
		go func() { patient <- ask(t.Context()) }()
		time.Sleep(time.Second)
		close(p.answer)
		if err := <-patient; err != nil {
			t.Errorf("a slow disk: %v", err)
		}
		synctest.Wait()
		p.answer = make(chan struct{})
		asked.Store(0)
		refusals := make(chan error, 10*looksAtOnce)
		for range cap(refusals) {
			go func() { refusals <- ask(t.Context()) }()
		}
		for range cap(refusals) {
			if err := <-refusals; !errors.Is(err, errNoAnswer) || !fault.Is(err, fault.Unavailable) {
				t.Errorf("a disk that hangs: %v", err)
			}
		}
		if n := asked.Load(); n > looksAtOnce {
			t.Errorf("%d threads hang", n)
		}
		begin := time.Now()
		if err := ask(t.Context()); !errors.Is(err, errNoAnswer) || time.Since(begin) > 0 {
			t.Errorf("after %s: %v", time.Since(begin), err)
		}
		close(p.answer)
		synctest.Wait()
		if err := ask(t.Context()); err != nil {
			t.Errorf("when it answers: %v", err)
		}
	})
}

func (p *silent) Name() string { return p.name }
func (p *silent) List() []volume.Volume {
	return []volume.Volume{{ID: volume.VolumeID(p.name, "v"), Size: 1}}
}
func (p *silent) ListSnapshots() []volume.Snapshot { return nil }

func (p *silent) Usable() error {
	p.asked++
	<-p.answer
	return nil
}

func (p *silent) Capacity() (volume.Capacity, error) {
	p.asked++
	<-p.answer
	return volume.Capacity{Total: 7}, nil
}

func (p *silent) Allocated(string) (int64, error) {
	p.asked++
	<-p.answer
	return 5, nil
}

// A pool whose disk hangs reports trouble, and the other pool is still described. It is asked once,
// however often callers want to know.
func TestB08_APoolThatHangsIsDescribed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung := &silent{name: "hung", answer: make(chan struct{})}
		well := &silent{name: "well", answer: make(chan struct{})}
		close(well.answer)
		registry, err := volume.NewRegistry(nil, hung, well)
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		d := inventoryServer{driver: &Driver{Config: Config{Volumes: registry, Log: log}, readers: newReaders(log),
			staged: &stagedVolumes{}, deferrals: &deferrals{}, published: &publishedTargets{}}}
		look := func(atMost time.Duration) ([]*inventory.Pool, []*inventory.Volume) {
			t.Helper()
			begin := time.Now()
			pools, err := d.DescribePools(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			volumes, err := d.DescribeVolumes(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(begin); took > atMost {
				t.Errorf("it took %s, more than %s", took, atMost)
			}
			return pools.GetPools(), volumes.GetVolumes()
		}
		for i, atMost := range []time.Duration{lookTimeout, 0, 0} {
			pools, volumes := look(atMost)
			if !strings.Contains(pools[0].GetTrouble(), "hung") || pools[0].GetSize() != 0 || pools[1].GetTrouble() != "" ||
				pools[1].GetSize() != 7 {
				t.Errorf("look %d: %v", i, pools)
			}
			if len(volumes) != 2 || volumes[0].GetSize() != 1 || volumes[0].GetAllocated() != 0 || volumes[1].GetAllocated() != 5 {
				t.Errorf("look %d: %v", i, volumes)
			}
		}
		if err := d.driver.Ready(); !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "hung") {
			t.Errorf("a pool that does not answer is ready: %v", err)
		}
		if hung.asked != 1 {
			t.Errorf("asked %d times", hung.asked)
		}
		close(hung.answer)
		synctest.Wait()
		if pools, volumes := look(0); pools[0].GetTrouble() != "" || pools[0].GetSize() != 7 || volumes[0].GetAllocated() != 5 {
			t.Errorf("when it answers: %v %v", pools, volumes)
		}
		if err := d.driver.Ready(); err != nil {
			t.Errorf("pools that can be used: %v", err)
		}
	})
}

// Counting what is shared in a pool may take long. A waiting caller is told so, and the disk does
// not count as sick.
func TestD11_SizesThatTakeLongAreNoSickDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &silent{name: "busy", answer: make(chan struct{})}
		log := slog.New(slog.DiscardHandler)
		d := &Driver{Config: Config{Log: log}, readers: newReaders(log)}
		count := func() error {
			_, err := askSizes(t.Context(), d, p, func() (int, error) { <-p.answer; return 1, nil })
			return err
		}
		for range 2 {
			if err := count(); !errors.Is(err, errCounting) || errors.Is(err, errNoAnswer) || !fault.Is(err, fault.Unavailable) {
				t.Errorf("its sizes: %v", err)
			}
			if _, err := askPool(t.Context(), d, p, func() (int, error) { return 1, nil }); err != nil {
				t.Errorf("another question: %v", err)
			}
		}
		close(p.answer)
		synctest.Wait()
		if err := count(); err != nil {
			t.Errorf("its sizes, later: %v", err)
		}
	})
}
