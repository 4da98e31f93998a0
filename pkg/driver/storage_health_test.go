package driver

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// ill is a pool that is not well.
type ill struct {
	volume.Pool
	name     string
	ailments []mounter.Ailment
	unusable error
	hangs    chan struct{}
}

func (*ill) Sizes() volume.Sizes { return volume.FileSizes() }

func (p *ill) Name() string  { return p.name }
func (p *ill) Usable() error { return p.unusable }

func (p *ill) Health(id string) []mounter.Ailment {
	if id != "" {
		panic("of a volume")
	}
	if p.hangs != nil {
		<-p.hangs
	}
	return p.ailments
}

// 11.5: pools by their problems. The API server refuses more than 16 entries, two with one status
// and reason, and texts of more than 1024 bytes.
func TestHealth_OfTheNodesPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := []mounter.Ailment{{Reason: "PoolFull", Fatal: true, Message: "no room"}}
		stuck := &ill{name: "stuck", hangs: make(chan struct{})}
		pools := []volume.Pool{
			&ill{name: "sound"},
			&ill{name: "away", ailments: []mounter.Ailment{{Reason: "PoolIsAway", Fatal: true, Message: strings.Repeat("x", 5000)}}},
			&ill{name: "readonly", unusable: fault.New(fault.State, "cannot be written")},
			stuck,
			&ill{name: "low", ailments: []mounter.Ailment{{Reason: "PoolNearlyFull", Message: "little room"}}},
		}
		for i := range 20 {
			pools = append(pools, &ill{name: fmt.Sprintf("full%d", i), ailments: full})
		}
		registry, err := volume.NewRegistry(nil, pools...)
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.DiscardHandler)
		d := &Driver{Config: Config{Volumes: registry, Log: log}, readers: newReaders(log)}
		ask := func() []string {
			t.Helper()
			resp, err := d.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range resp.GetBackendHealth() {
				got = append(got, fmt.Sprintf("%s %s %.60s", e.GetStatus(), e.GetReason(), e.GetMessage()))
				if len(e.GetMessage()) > 1024 || strings.ContainsAny(e.GetReason(), " :") {
					t.Errorf("%d bytes of %s", len(e.GetMessage()), e.GetReason())
				}
			}
			return got
		}
		want := []string{
			"STORAGE_UNREACHABLE PoolIsAway pool away: " + strings.Repeat("x", 49),
			"STORAGE_UNREACHABLE PoolUnusable pool readonly: cannot be written",
			"STORAGE_UNREACHABLE DoesNotAnswer pool stuck has not answered within 5s, so its disk or server",
			"STORAGE_DEGRADED PoolNearlyFull pool low: little room",
			"STORAGE_DEGRADED PoolFull pool full0: no room; pool full1: no room; pool full2: no roo",
		}
		if got := ask(); !slices.Equal(got, want) {
			t.Errorf("%q\nnot\n%q", got, want)
		}
		// Known from then on, and reported at once.
		begin := time.Now()
		if got := ask(); len(got) != len(want) || !strings.HasPrefix(got[2], "STORAGE_UNREACHABLE DoesNotAnswer") || time.Since(begin) > 0 {
			t.Errorf("asked again, after %s: %q", time.Since(begin), got)
		}
		close(stuck.hangs)
		synctest.Wait()
		want = slices.Delete(want, 2, 3)
		if got := ask(); !slices.Equal(got, want) {
			t.Errorf("when it answers: %q", got)
		}
	})
}

// The API server refuses a pod's status with a longer text.
func TestHealth_AVolumesTextIsBounded(t *testing.T) {
	p := &wordy{}
	registry, err := volume.NewRegistry(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d := &Driver{Config: Config{Volumes: registry, Log: log}, readers: newReaders(log),
		staged: &stagedVolumes{m: map[string]stagedRecord{}}, deferrals: &deferrals{}}
	resp, err := d.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: volume.VolumeID("wordy", "a")})
	if err != nil {
		t.Fatal(err)
	}
	all := resp.GetVolumeHealth().GetHealthStatuses()
	if len(all) != 1 || len(all[0].GetMessage()) > 1024 || !strings.HasPrefix(all[0].GetMessage(), strings.Repeat("x", 100)) {
		t.Errorf("%v", all)
	}
}

type wordy struct{ volume.Pool }

func (*wordy) Sizes() volume.Sizes { return volume.FileSizes() }

func (wordy) Name() string                         { return "wordy" }
func (wordy) Get(id string) (volume.Volume, error) { return volume.Volume{ID: id}, nil }
func (wordy) Health(string) []mounter.Ailment {
	return []mounter.Ailment{{Reason: "Torn", Message: strings.Repeat("x", 5000)}}
}
