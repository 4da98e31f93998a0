package telemetry

import (
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// Volume ids may be any text: none makes the metrics unreadable.
func TestMonitoring_AnyVolumeCanBeShown(t *testing.T) {
	m := New("test")
	m.Volumes(func() Volumes {
		return Volumes{
			Unhealthy: []Unhealthy{{"a\"\n\xff", "FilesystemError", "degraded"}, {"b", "FilesystemError", "degraded"},
				{"b", "DeviceGone", "inaccessible"}},
			Growth: []Growth{{"b", "no_room"}},
		}
	}, func() map[string]time.Time { return map[string]time.Time{"b": time.UnixMilli(1500)} })
	w := httptest.NewRecorder()
	m.Handler(func() error { return nil }).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	b, err := io.ReadAll(w.Result().Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("%d %v\n%s", w.Code, err, b)
	}
	for _, want := range []string{
		`crust_volume_unhealthy{reason="FilesystemError",status="degraded",volume_id="a\"\n?"} 1`,
		`crust_volume_unhealthy{reason="DeviceGone",status="inaccessible",volume_id="b"} 1`,
		`crust_volume_growth_waiting{reason="no_room",volume_id="b"} 1`,
		`crust_ownership_walk_start_timestamp_seconds{volume_id="b"} 1.5`,
	} {
		if !strings.Contains(string(b), want+"\n") {
			t.Errorf("no %s in\n%s", want, b)
		}
	}
}

// An ended walk is not shown any more, though cached results may be some seconds old.
func TestMonitoring_AWalkThatHasEndedIsNotShown(t *testing.T) {
	m := New("test")
	running := map[string]time.Time{"v": time.UnixMilli(1500)}
	m.Volumes(func() Volumes { return Volumes{} }, func() map[string]time.Time { return running })
	shown := func() bool {
		w := httptest.NewRecorder()
		m.Handler(func() error { return nil }).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		return strings.Contains(w.Body.String(), "crust_ownership_walk_start_timestamp_seconds{")
	}
	if !shown() {
		t.Error("a walk that runs is not shown")
	}
	delete(running, "v")
	if shown() {
		t.Error("a walk that has ended is shown")
	}
}
