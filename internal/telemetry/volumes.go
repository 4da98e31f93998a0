package telemetry

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Volumes lists the volumes on this node that need attention. The others have no series, so there
// are few.
type Volumes struct {
	Unhealthy []Unhealthy
	Growth    []Growth
}

// Unhealthy is one problem of a volume.
type Unhealthy struct{ VolumeID, Reason, Status string }

// Growth is a growth that waits.
type Growth struct{ VolumeID, Reason string }

// volumesAgain is the maximum age of the reported volumes.
const volumesAgain = 10 * time.Second

type volumes struct {
	unhealthy, growth, walk *prometheus.Desc
	now                     *gathered[Volumes]
	walks                   func() map[string]time.Time
}

// Volumes shows which volumes need attention. ask runs in the background. walks returns, by volume,
// the start of the walk over its files; it runs in the scrape and must not block, so that an ended
// walk disappears at once.
func (m *Metrics) Volumes(ask func() Volumes, walks func() map[string]time.Time) {
	m.registry.MustRegister(volumes{
		unhealthy: prometheus.NewDesc("crust_volume_unhealthy",
			"1 for each thing that is wrong with a volume that is staged here, or lost writes here. "+
				"status: degraded, inaccessible, data_loss. A sound volume has no series.", []string{"volume_id", "reason", "status"}, nil),
		growth: prometheus.NewDesc("crust_volume_growth_waiting", "1 for a volume whose growth was asked for and is not done. "+
			"reason: file_system (the device is larger, its file system is not), no_room (the pool had no room).",
			[]string{"volume_id", "reason"}, nil),
		walk: prometheus.NewDesc("crust_ownership_walk_start_timestamp_seconds",
			"When the walk for fsGroup that runs over a volume's files began.",
			[]string{"volume_id"}, nil),
		now: &gathered[Volumes]{look: ask, again: volumesAgain}, walks: walks,
	})
}

func (v volumes) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{v.unhealthy, v.growth, v.walk} {
		to <- d
	}
}

func (v volumes) Collect(to chan<- prometheus.Metric) {
	now, _ := v.now.latest()
	for _, u := range now.Unhealthy {
		to <- prometheus.MustNewConstMetric(v.unhealthy, prometheus.GaugeValue, 1, valid(u.VolumeID), u.Reason, u.Status)
	}
	for _, g := range now.Growth {
		to <- prometheus.MustNewConstMetric(v.growth, prometheus.GaugeValue, 1, valid(g.VolumeID), g.Reason)
	}
	for id, since := range v.walks() {
		to <- prometheus.MustNewConstMetric(v.walk, prometheus.GaugeValue, float64(since.UnixMilli())/1000, valid(id))
	}
}

// valid returns an id as a valid label. Ids of administrators' volumes may be any text.
func valid(id string) string { return strings.ToValidUTF8(id, "?") }
