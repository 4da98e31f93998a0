package driver

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// moody is a pool some of whose volumes hang until they are released.
type moody struct {
	volume.Pool
	hangs map[string]chan struct{}
	looks map[string]*atomic.Int32
}

func (*moody) Sizes() volume.Sizes { return volume.FileSizes() }

func (p *moody) Name() string { return "pool" }

func (p *moody) Get(id string) (volume.Volume, error) {
	if answer, ok := p.hangs[id]; ok {
		p.looks[id].Add(1)
		<-answer
	}
	return volume.Volume{ID: id, Facts: volume.Facts{GrowDue: true}}, nil
}

func (p *moody) Health(string) []mounter.Ailment {
	return []mounter.Ailment{{Reason: "Torn"}, {Reason: "PoolNearlyFull"}}
}

func (p *moody) Attached(string) (volume.Attachment, bool, error) {
	return volume.Attachment{Share: &volume.Share{}}, true, nil
}

// Volumes that hang do not delay the others, even if more hang than are looked at in parallel. Each
// has one look under way, however often callers ask.
func TestMonitoring_AVolumeThatHangsDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := &moody{hangs: map[string]chan struct{}{}, looks: map[string]*atomic.Int32{}}
		registry, err := volume.NewRegistry(nil, pool)
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		d := &Driver{Config: Config{Volumes: registry, Log: log}, readers: newReaders(log),
			staged: &stagedVolumes{m: map[string]stagedRecord{}}, deferrals: &deferrals{}}
		const hung, well = looksAtOnce + 2, 5
		for i := range hung + well {
			id := volume.VolumeID("pool", fmt.Sprint(i))
			d.staged.m[id] = stagedRecord{VolumeID: id}
			if i < hung {
				pool.hangs[id], pool.looks[id] = make(chan struct{}), &atomic.Int32{}
			}
		}
		count := func(atMost time.Duration) (answers, torn, growing int) {
			t.Helper()
			begin := time.Now()
			unhealthy, waiting := d.Conditions()
			if took := time.Since(begin); took > atMost {
				t.Errorf("the look took %s, more than %s", took, atMost)
			}
			for _, u := range unhealthy {
				switch u.Reason {
				case "DoesNotAnswer":
					answers++
				case "Torn":
					torn++
				}
			}
			return answers, torn, len(waiting)
		}
		// The kubelet's look at another one hangs already.
		kubelets, answer := volume.VolumeID("pool", "kubelet's"), make(chan struct{})
		d.staged.m[kubelets] = stagedRecord{VolumeID: kubelets}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := d.readers.look(ctx, ofVolume(kubelets), func() error { <-answer; return nil }); err == nil {
			t.Error("it does not hang")
		}
		time.Sleep(2 * readerPatience)
		if silent, _, _ := count(2 * lookTimeout); silent != hung+1 {
			t.Errorf("%d do not answer, one of them to the kubelet", silent)
		}
		close(answer)
		delete(d.staged.m, kubelets)
		if silent, torn, growing := count(0); silent != hung || torn != well || growing != well {
			t.Errorf("%d do not answer, %d are torn, %d wait", silent, torn, growing)
		}
		for range 5 {
			time.Sleep(2 * readerPatience)
			if silent, torn, growing := count(0); silent != hung || torn != well || growing != well {
				t.Errorf("later: %d do not answer, %d are torn, %d wait", silent, torn, growing)
			}
		}
		for id, looks := range pool.looks {
			if n := looks.Load(); n != 1 {
				t.Errorf("%d looks at %s", n, id)
			}
			close(pool.hangs[id])
		}
		synctest.Wait()
		if silent, torn, growing := count(0); silent != 0 || torn != hung+well || growing != hung+well {
			t.Errorf("when they answer: %d do not, %d are torn, %d wait", silent, torn, growing)
		}
	})
}

// A volume that is being taken away answers nobody: writing out its disk may take minutes. Its disk
// does not hang, whatever the last look found.
func TestD11_AVolumeThatIsUnstagedIsNotSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		id := volume.VolumeID("pool", "a")
		answer := make(chan struct{})
		pool := &moody{hangs: map[string]chan struct{}{id: answer}, looks: map[string]*atomic.Int32{id: {}}}
		registry, err := volume.NewRegistry(nil, pool)
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		d := &Driver{Config: Config{Volumes: registry, Log: log}, readers: newReaders(log),
			staged: &stagedVolumes{m: map[string]stagedRecord{id: {VolumeID: id}}}, deferrals: &deferrals{}}
		look := func() (found []string) {
			t.Helper()
			unhealthy, _ := d.Conditions()
			for _, u := range unhealthy {
				found = append(found, u.Reason)
			}
			return found
		}
		if got := look(); !slices.Contains(got, doesNotReply) {
			t.Fatalf("a disk that hangs: %v", got)
		}
		close(answer)
		synctest.Wait()
		done := d.readers.exclude(id, "being unstaged")
		for range 3 {
			time.Sleep(time.Minute)
			if got := look(); len(got) != 0 {
				t.Errorf("while it is unstaged: %v", got)
			}
			health, err := d.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
			if err != nil {
				t.Fatal(err)
			}
			all := health.GetVolumeHealth().GetHealthStatuses()
			if len(all) != 1 || all[0].GetReason() != "BeingTakenAway" || !strings.Contains(all[0].GetMessage(), "being unstaged") ||
				all[0].GetStatus() != csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE {
				t.Errorf("its health: %v", all)
			}
		}
		done()
		if got := look(); !slices.Equal(got, []string{"Torn"}) {
			t.Errorf("afterwards: %v", got)
		}
	})
}

// Growth waits until it is made, or less is requested.
func TestMonitoring_RefusedGrowthIsKnownUntilItIsMade(t *testing.T) {
	var g refusedGrowth
	g.note("b", nil)
	g.note("b", fault.New(fault.NoSpace, "full"))
	g.note("a", fault.New(fault.NoSpace, "full"))
	g.note("a", fault.New(fault.Busy, "later")) // says nothing of the room
	g.note("c", fault.New(fault.Busy, "later"))
	if got := g.all(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("waiting: %v", got)
	}
	g.note("a", nil)
	if got := g.all(); !slices.Equal(got, []string{"b"}) {
		t.Errorf("waiting after one was made: %v", got)
	}
}
