package monitoring

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/crust-csi/crust-csi/deploy/monitoring"
)

const (
	project   = "../.."
	directory = project + "/deploy/monitoring"
	// scrapeInterval is the interval that the rules assume. Here it is a second on an idle machine,
	// so that an hour of the rules takes half a minute.
	scrapeInterval = 2 * time.Minute
)

// patience is far more than all of this takes (some 40 s on two idle processors, and as much longer as the scrape interval is).
var patience = 10 * time.Minute

// prometheus is a real Prometheus with the real rules, in which only times are shorter.
type prometheus struct {
	t       *testing.T
	dir     string
	address string

	mu    sync.Mutex
	fired map[string]bool // alerts, by name and distinguishing labels
	now   int             // how many of them fire
}

// target is a daemon to scrape.
type target struct {
	Targets []string          `json:"targets"`
	Labels  map[string]string `json:"labels"`
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	ok(t, l.Close())
	return l.Addr().String()
}

var duration = regexp.MustCompile(`\b(\d+)([smh])\b`)

// pace is the scrape interval of this run. It shortens all durations of the rules in proportion.
type pace time.Duration

func (p pace) of(d time.Duration) time.Duration {
	return time.Duration(float64(d) * float64(p) / float64(scrapeInterval))
}

// measured returns a second, or more on a busy machine: twenty times the slowest answer of the
// targets, and half a second for each process that waits for a processor. A daemon that is too busy
// to answer is not away.
func measured(t *testing.T, targets []target) pace {
	t.Helper()
	var longest time.Duration
	for range 20 {
		for _, at := range targets {
			begin := time.Now()
			r, err := http.Get("http://" + at.Targets[0] + "/metrics")
			ok(t, err)
			_, err = io.Copy(io.Discard, r.Body)
			ok(t, errors.Join(err, r.Body.Close()))
			longest = max(longest, time.Since(begin))
		}
		time.Sleep(50 * time.Millisecond)
	}
	var load float64 // of the last minute
	b, err := os.ReadFile("/proc/loadavg")
	ok(t, err)
	_, err = fmt.Sscan(string(b), &load)
	ok(t, err)
	waiting := load / float64(runtime.NumCPU())
	p := max(pace(time.Second), pace(20*longest), pace(waiting*float64(time.Second)/2))
	patience = max(patience, 100*time.Duration(p))
	t.Logf("an answer took %s at most, and %.1f processes want each processor: the scrape interval is %s",
		longest.Round(time.Millisecond), waiting,
		time.Duration(p).Round(time.Millisecond))
	return p
}

// shorten shortens every duration in a text.
func (p pace) shorten(text string) string {
	return duration.ReplaceAllStringFunc(text, func(d string) string {
		whole, err := time.ParseDuration(d)
		if err != nil {
			panic(err)
		}
		return milliseconds(p.of(whole))
	})
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) + "ms" }

// rules returns the project's rules with shorter times. The duration of a walk is compared in
// seconds.
func (p pace) rules(t *testing.T) (rules monitoring.PrometheusRule, longest time.Duration) {
	t.Helper()
	rules, err := monitoring.ReadRules(directory)
	ok(t, err)
	for i := range rules.Spec.Groups {
		for j := range rules.Spec.Groups[i].Rules {
			a := &rules.Spec.Groups[i].Rules[j]
			if a.For != "" {
				d, err := time.ParseDuration(a.For)
				ok(t, err)
				longest = max(longest, p.of(d))
			}
			a.For, a.Expr = p.shorten(a.For), p.shorten(a.Expr)
			if a.Alert == "CrustOwnershipWalkSlow" {
				if !strings.HasSuffix(a.Expr, "> 900") {
					t.Fatalf("%s: %s", a.Alert, a.Expr)
				}
				a.Expr = strings.TrimSuffix(a.Expr, "900") + fmt.Sprint(p.of(900*time.Second).Seconds())
			}
		}
	}
	return rules, longest
}

func newPrometheus(t *testing.T, pace pace, rules monitoring.PrometheusRule, targets []target) *prometheus {
	t.Helper()
	interval := milliseconds(time.Duration(pace))
	p := &prometheus{t: t, dir: t.TempDir(), address: freeAddress(t), fired: map[string]bool{}}
	b, err := yaml.Marshal(rules.Spec)
	ok(t, err)
	ok(t, os.WriteFile(filepath.Join(p.dir, "rules.yaml"), b, 0o600))
	ok(t, os.WriteFile(filepath.Join(p.dir, "prometheus.yaml"), []byte(`
global: {scrape_interval: `+interval+`, scrape_timeout: `+interval+`, evaluation_interval: 250ms}
rule_files: [rules.yaml]
scrape_configs:
  - {job_name: daemons, file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]}
`), 0o600))
	p.scrape(targets)
	cmd := exec.Command(monitoring.Tool(project, "prometheus"), "--config.file="+filepath.Join(p.dir, "prometheus.yaml"),
		"--storage.tsdb.path="+filepath.Join(p.dir, "data"), "--web.listen-address="+p.address, "--log.level=warn")
	log := &strings.Builder{}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v; scripts/monitoring.sh gets it", err)
	}
	watched, stopped := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() {
		close(stopped)
		<-watched
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("Prometheus said:\n%s", log)
		}
	})
	go func() {
		defer close(watched)
		p.watch(stopped)
	}()
	eventually(t, "Prometheus answers", func() bool {
		_, err := p.get("/-/ready", nil)
		return err == nil
	})
	return p
}

// scrape sets the targets.
func (p *prometheus) scrape(targets []target) {
	p.t.Helper()
	b, err := json.Marshal(targets)
	ok(p.t, err)
	file := filepath.Join(p.dir, "targets.json")
	ok(p.t, os.WriteFile(file+".new", b, 0o600))
	ok(p.t, os.Rename(file+".new", file))
}

func (p *prometheus) get(path string, values url.Values) ([]byte, error) {
	r, err := http.Get("http://" + p.address + path + "?" + values.Encode())
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, r.Status, b)
	}
	return b, err
}

// series is one line of an answer.
type series struct {
	Metric map[string]string `json:"metric"`
	Values [][2]any          `json:"values"`
	Value  [2]any            `json:"value"`
}

func (p *prometheus) query(path string, values url.Values) []series {
	p.t.Helper()
	b, err := p.get(path, values)
	ok(p.t, err)
	var answer struct {
		Data struct{ Result []series }
	}
	ok(p.t, json.Unmarshal(b, &answer))
	return answer.Data.Result
}

// instant returns an expression's current series.
func (p *prometheus) instant(expr string) []series {
	p.t.Helper()
	return p.query("/api/v1/query", url.Values{"query": {expr}})
}

// number returns an expression's value, or 0 if it has none.
func (p *prometheus) number(expr string) float64 {
	p.t.Helper()
	r := p.instant(expr)
	if len(r) != 1 {
		return 0
	}
	n, err := strconv.ParseFloat(r[0].Value[1].(string), 64)
	ok(p.t, err)
	return n
}

// watch records which alerts /api/v1/alerts shows firing.
func (p *prometheus) watch(stopped chan struct{}) {
	for {
		select {
		case <-stopped:
			return
		case <-time.After(200 * time.Millisecond):
		}
		b, err := p.get("/api/v1/alerts", nil)
		var answer struct {
			Data struct {
				Alerts []struct {
					State  string
					Labels map[string]string
				}
			}
		}
		if err != nil || json.Unmarshal(b, &answer) != nil {
			continue // it is starting
		}
		p.mu.Lock()
		p.now = 0
		for _, a := range answer.Data.Alerts {
			key := a.Labels["alertname"]
			for _, label := range []string{"node", "pool", "reason", "method"} {
				if a.Labels[label] != "" {
					key += " " + a.Labels[label]
				}
			}
			if a.State != "firing" {
				continue
			}
			p.now++
			p.fired[key] = true
		}
		p.mu.Unlock()
	}
}

// seen returns the alerts that have fired so far.
func (p *prometheus) seen() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.fired))
}

// wantFired waits until all these have fired. Any other alert fails the test.
func (p *prometheus) wantFired(want []string) {
	p.t.Helper()
	missing := func() (list []string) {
		seen := p.seen()
		for _, w := range want {
			if !slices.Contains(seen, w) {
				list = append(list, w)
			}
		}
		return list
	}
	begin := time.Now()
	for len(missing()) > 0 {
		if time.Since(begin) > patience {
			p.t.Fatalf("these have not fired:\n%s\nthese have:\n%s", strings.Join(missing(), "\n"), strings.Join(p.seen(), "\n"))
		}
		time.Sleep(100 * time.Millisecond)
	}
	p.t.Logf("fired after %s", time.Since(begin).Round(time.Millisecond))
	for _, s := range p.seen() {
		if !slices.Contains(want, s) {
			p.t.Errorf("it has fired for no fault: %s", s)
		}
	}
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it never came to this: %s", what)
		}
	}
}
