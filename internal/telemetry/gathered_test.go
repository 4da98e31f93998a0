package telemetry

import (
	"io"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// scraper returns a function that reads the metrics, and fails the test if that takes longer than
// bound.
func scraper(t *testing.T, m *Metrics) func(bound time.Duration) string {
	h := m.Handler(func() error { return nil })
	return func(bound time.Duration) string {
		t.Helper()
		begin := time.Now()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		if took := time.Since(begin); took > bound {
			t.Errorf("a scrape took %s, more than %s", took, bound)
		}
		b, err := io.ReadAll(w.Result().Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
}

func wantLines(t *testing.T, page string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if !strings.Contains("\n"+page, "\n"+line+"\n") {
			t.Errorf("no %q in\n%s", line, page)
		}
	}
}

// A scrape does not wait for a hung disk: it shows the pool's last sizes, and -1 after a long hang.
// Many scrapes share one look.
func TestMonitoring_AScrapeWaitsForNoSickDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looks, free atomic.Int64
		free.Store(7)
		var hang atomic.Pointer[chan struct{}]
		sick := func() {
			looks.Add(1)
			if c := hang.Load(); c != nil {
				<-*c
			}
		}
		m := New("test")
		m.Pool("p", func() (PoolBytes, error) { sick(); return PoolBytes{Available: free.Load()}, nil })
		m.Volumes(func() Volumes { return Volumes{Growth: []Growth{{"v", "no_room"}}} }, func() map[string]time.Time { return nil })
		scrape := scraper(t, m)
		const growth = `crust_volume_growth_waiting{reason="no_room",volume_id="v"} 1`
		available := func(n string) string { return `crust_pool_available_bytes{pool="p"} ` + n }

		wantLines(t, scrape(0), available("7"), growth)
		free.Store(8)
		wantLines(t, scrape(0), available("8")) // a pool that answers is read again
		answer := make(chan struct{})
		hang.Store(&answer)
		wantLines(t, scrape(patience), available("8"), growth)
		for range 20 {
			time.Sleep(time.Second)
			wantLines(t, scrape(0), available("8"), growth)
		}
		if n := looks.Load(); n != 3 {
			t.Errorf("%d looks at a pool", n)
		}
		time.Sleep(lost)
		wantLines(t, scrape(0), available("-1"), growth)
		free.Store(9)
		hang.Store(nil)
		close(answer)
		synctest.Wait()
		wantLines(t, scrape(0), available("9"))
	})
}

// The volumes are read every ten seconds at most.
func TestMonitoring_ScrapesShareALook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		m := New("test")
		m.Volumes(func() Volumes { looks++; return Volumes{} }, func() map[string]time.Time { return nil })
		scrape := scraper(t, m)
		for range 5 {
			scrape(0)
			time.Sleep(volumesAgain / 5)
		}
		if looks != 1 {
			t.Errorf("%d looks", looks)
		}
		scrape(0)
		if looks != 2 {
			t.Errorf("%d looks, later", looks)
		}
	})
}
