// Package telemetry counts what the driver does, for Prometheus.
package telemetry

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics are the metrics of one process.
type Metrics struct {
	registry *prometheus.Registry
	duration *prometheus.HistogramVec
	inFlight *prometheus.GaugeVec
	made     *prometheus.CounterVec
	checked  *prometheus.CounterVec
	grown    *prometheus.CounterVec
	programs *prometheus.CounterVec
	copied   *prometheus.CounterVec

	ownership        *prometheus.HistogramVec
	ownershipLooked  *prometheus.CounterVec
	ownershipChanged *prometheus.CounterVec
	ownershipSkipped *prometheus.CounterVec
	contextMounts    *prometheus.CounterVec
	readOnly         *prometheus.CounterVec
	deferrals        *prometheus.CounterVec
}

// New makes and registers them.
func New(version string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crust_csi_request_duration_seconds", Help: "How long CSI calls took.",
			Buckets: []float64{.0001, .0003, .001, .003, .01, .03, .1, .3, 1, 3, 10, 30, 120},
		}, []string{"method", "code"}),
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "crust_csi_requests_in_flight", Help: "CSI calls that run now."},
			[]string{"method"}),
		made:     counter("crust_filesystems_made_total", "File systems made on blank devices.", "fs_type"),
		checked:  counter("crust_filesystem_checks_total", "File system checks, by outcome: clean, repaired, needs-human.", "outcome"),
		grown:    counter("crust_filesystems_grown_total", "File systems grown, by how: online, offline.", "fs_type", "how"),
		programs: counter("crust_programs_started_total", "Programs started (mkfs, fsck and the like).", "program"),
		copied: counter("crust_pool_copied_bytes_total", "Bytes copied for snapshots and clones where extents could not be shared.",
			"pool"),

		ownership: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crust_ownership_duration_seconds", Help: "How long giving a volume to the pod's fsGroup took.",
			Buckets: []float64{.0001, .001, .01, .1, 1, 10, 60, 300, 1800},
		}, []string{"strategy"}),
		ownershipLooked: counter("crust_ownership_files_looked_at_total", "Files and directories that walks for fsGroup looked at.",
			"strategy"),
		ownershipChanged: counter("crust_ownership_files_changed_total",
			"Files and directories whose group or mode was changed for fsGroup.",
			"strategy"),
		ownershipSkipped: counter("crust_ownership_skipped_total",
			"Publishes without a walk for fsGroup, by reason: no-group, read-only, record, share.", "reason"),
		contextMounts: counter("crust_selinux_context_mounts_total", "Mounts with a SELinux context, by outcome: applied, "+
			"conflict (the volume is mounted with another label, or none), mismatch, error; and by the volume's access mode: RWO, RWOP, ROX, RWX, other.",
			"outcome", "access_mode"),
		readOnly: counter("crust_read_only_publishes_total", "Read-only publishes, by what was applied: recursive, plain, device.",
			"applied"),
	}
	m.deferrals = counter("crust_agent_volumes_total",
		"Volumes of pods with a CRUST runtime, by what became of them: deferred, host, published, failed.", "outcome")
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "crust_build_info", Help: "1, with the version."}, []string{"version"})
	build.WithLabelValues(version).Set(1)
	m.registry.MustRegister(m.duration, m.inFlight, m.made, m.checked, m.grown, m.programs, m.copied, build,
		m.ownership, m.ownershipLooked, m.ownershipChanged, m.ownershipSkipped, m.contextMounts, m.readOnly, m.deferrals,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Expect creates the series of possible file system events, at 0: Prometheus sees no increase in a
// series that begins with its first event.
func (m *Metrics) Expect(filesystems, programs, outcomes []string) {
	for _, fs := range filesystems {
		m.made.WithLabelValues(fs)
		m.grown.WithLabelValues(fs, "online")
		m.grown.WithLabelValues(fs, "offline")
	}
	for _, program := range programs {
		m.programs.WithLabelValues(program)
	}
	for _, outcome := range outcomes {
		m.checked.WithLabelValues(outcome)
	}
}

// ExpectDeferrals creates the series of Deferral, at 0.
func (m *Metrics) ExpectDeferrals() {
	for _, outcome := range []string{"deferred", "host", "published", "failed"} {
		m.deferrals.WithLabelValues(outcome)
	}
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

// Started counts the start of a call; the returned function counts its end.
func (m *Metrics) Started(method string) func(code string) {
	begin := time.Now()
	gauge := m.inFlight.WithLabelValues(method)
	gauge.Inc()
	return func(code string) {
		gauge.Dec()
		m.duration.WithLabelValues(method, code).Observe(time.Since(begin).Seconds())
	}
}

// FilesystemMade counts a mkfs.
func (m *Metrics) FilesystemMade(fstype string) { m.made.WithLabelValues(fstype).Inc() }

// FilesystemChecked counts a fsck.
func (m *Metrics) FilesystemChecked(outcome string) { m.checked.WithLabelValues(outcome).Inc() }

// FilesystemGrown counts a growth.
func (m *Metrics) FilesystemGrown(fstype, how string) { m.grown.WithLabelValues(fstype, how).Inc() }

// OwnershipApplied counts a publish that gave a volume to a group.
func (m *Metrics) OwnershipApplied(strategy string, took time.Duration, looked, changed int64) {
	m.ownership.WithLabelValues(strategy).Observe(took.Seconds())
	m.ownershipLooked.WithLabelValues(strategy).Add(float64(looked))
	m.ownershipChanged.WithLabelValues(strategy).Add(float64(changed))
}

// OwnershipSkipped counts a publish that examined no file.
func (m *Metrics) OwnershipSkipped(reason string) { m.ownershipSkipped.WithLabelValues(reason).Inc() }

// ContextMount counts a mount with a SELinux context.
func (m *Metrics) ContextMount(outcome, accessMode string) {
	m.contextMounts.WithLabelValues(outcome, accessMode).Inc()
}

// ReadOnlyPublish counts a read-only publish.
func (m *Metrics) ReadOnlyPublish(applied string) { m.readOnly.WithLabelValues(applied).Inc() }

// Deferral counts the outcome of a volume that crust-agent decided on.
func (m *Metrics) Deferral(outcome string) { m.deferrals.WithLabelValues(outcome).Inc() }

// ProgramStarted counts the start of a program.
func (m *Metrics) ProgramStarted(program string) { m.programs.WithLabelValues(program).Inc() }

// Copied returns a function that counts bytes copied in a pool.
func (m *Metrics) Copied(pool string) func(int64) {
	c := m.copied.WithLabelValues(pool)
	return func(n int64) { c.Add(float64(n)) }
}

// PoolBytes are the reported sizes of a pool, in bytes.
type PoolBytes struct{ Size, Available, Used, Promised, Left, Reserve int64 }

// poolSizes queries a pool once per scrape.
type poolSizes struct {
	list  []*prometheus.Desc
	sizes *gathered[PoolBytes]
}

// unreadable are the sizes of a pool that cannot be read.
var unreadable = PoolBytes{-1, -1, -1, -1, -1, -1}

// Pool shows a pool's size, free space and promised space; -1 if it cannot be read. ask runs in the
// background: a disk that hangs does not hang the metrics.
func (m *Metrics) Pool(name string, ask func() (PoolBytes, error)) {
	p := poolSizes{sizes: &gathered[PoolBytes]{look: func() PoolBytes {
		b, err := ask()
		if err != nil {
			return unreadable
		}
		return b
	}}}
	for _, d := range [][2]string{
		{"size", "Size of the file system that the pool is on; -1: it cannot be read."},
		{"available", "What is left of it; thin volumes fail writes when it is 0. -1: it cannot be read."},
		{"used", "What the pool's volumes and snapshots take of it."},
		{"promised", "Sizes of the pool's volumes, and what its snapshots hold."},
		{"left", "What can still be promised."},
		{"reserve", "What is kept for the driver's own records."},
	} {
		p.list = append(p.list, prometheus.NewDesc("crust_pool_"+d[0]+"_bytes", d[1], nil, prometheus.Labels{"pool": name}))
	}
	m.registry.MustRegister(p)
}

func (p poolSizes) Describe(to chan<- *prometheus.Desc) {
	for _, d := range p.list {
		to <- d
	}
}

func (p poolSizes) Collect(to chan<- prometheus.Metric) {
	b, ok := p.sizes.latest()
	if !ok {
		b = unreadable
	}
	for i, n := range []int64{b.Size, b.Available, b.Used, b.Promised, b.Left, b.Reserve} {
		to <- prometheus.MustNewConstMetric(p.list[i], prometheus.GaugeValue, float64(n))
	}
}

// Handler serves /metrics, /healthz (the process answers) and /readyz (it can do its work).
func (m *Metrics) Handler(ready func() error) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, ready()) })
	return mux
}

func answer(w http.ResponseWriter, err error) {
	text := "ok\n"
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		text = err.Error() + "\n"
	}
	_, _ = w.Write([]byte(text)) // the client may be gone; nobody else needs the error
}
