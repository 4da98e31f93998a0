package node

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// withMetrics is testnode.New; the function reads the node's metrics.
func withMetrics(t *testing.T, args ...string) (*testnode.Node, func() string) {
	t.Helper()
	address := freeAddress(t)
	n := testnode.New(t, "", append([]string{"--metrics-address", address}, args...)...)
	return n, func() string { t.Helper(); return readMetrics(t, address) }
}

func readMetrics(t *testing.T, address string) string {
	t.Helper()
	r, err := http.Get("http://" + address + "/metrics")
	ok(t, err)
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	ok(t, err)
	return string(body)
}

// freeAddress returns one of this machine that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	ok(t, l.Close())
	return l.Addr().String()
}

// wantMetric expects a line of metrics, such as `name{label="x"} 1`. The value "" expects no such
// line.
func wantMetric(t *testing.T, metrics, name, value string) {
	t.Helper()
	for line := range strings.Lines(metrics) {
		if rest, found := strings.CutPrefix(line, name+" "); found {
			if got := strings.TrimSpace(rest); got != value {
				t.Errorf("%s is %s, want %q", name, got, value)
			}
			return
		}
	}
	if value != "" {
		t.Errorf("no %s in the metrics, want %s", name, value)
	}
}

// Prometheus sees no increase in a series that begins with its first event. So every possible event
// has a series from the start, and the dashboard shows a node's first growth.
func TestMonitoring_TheFirstEventIsAnIncrease(t *testing.T) {
	t.Parallel()
	_, metrics := withMetrics(t)
	now := metrics()
	for _, series := range []string{
		`crust_filesystems_made_total{fs_type="xfs"}`, `crust_filesystems_grown_total{fs_type="xfs",how="online"}`,
		`crust_filesystems_grown_total{fs_type="ext4",how="offline"}`, `crust_filesystem_checks_total{outcome="needs-human"}`,
		`crust_programs_started_total{program="e2fsck"}`, `crust_programs_started_total{program="mkfs.btrfs"}`,
	} {
		wantMetric(t, now, series, "0")
	}
}
