package monitoring

import (
	"math"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/crust-csi/crust-csi/deploy/monitoring"
	"github.com/crust-csi/crust-csi/test/monitoring/picture"
)

// draw writes the dashboard's picture of the test run, from Prometheus' answers to its queries. The
// window for rates is shortened like all other times.
func (p *prometheus) draw(file string, begin time.Time) {
	p.t.Helper()
	d, err := monitoring.ReadDashboard(directory)
	ok(p.t, err)
	end := time.Now()
	svg := picture.Draw(d, end.Sub(begin).Seconds(), func(expr string) (lines []picture.Line) {
		values := url.Values{"query": {monitoring.Expand(expr, "5s")}, "start": {stamp(begin)}, "end": {stamp(end)}, "step": {"0.5"}}
		for _, s := range p.query("/api/v1/query_range", values) {
			l := picture.Line{Labels: s.Metric}
			for _, v := range s.Values {
				n, err := strconv.ParseFloat(v[1].(string), 64)
				if err != nil {
					n = math.NaN()
				}
				l.Points = append(l.Points, picture.Point{At: v[0].(float64) - float64(begin.UnixMilli())/1000, Value: n})
			}
			lines = append(lines, l)
		}
		return lines
	})
	ok(p.t, os.WriteFile(filepath.Join(project, file), []byte(svg), 0o644))
}
