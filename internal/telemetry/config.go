package telemetry

import "github.com/prometheus/client_golang/prometheus"

// Config shows whether the configuration file was valid when last read, and whether it contains
// changes that need a restart.
func (m *Metrics) Config(ask func() (usable, restart bool)) {
	m.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "crust_config_last_reload_successful", Help: "1 if the configuration file could be used when it was read last, 0 if not.",
		}, func() float64 { usable, _ := ask(); return number(usable) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "crust_config_restart_required", Help: "1 if the configuration file has pools that are used after a restart only.",
		}, func() float64 { _, restart := ask(); return number(restart) }),
	)
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
