package nodeconfig

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// Every is how often Watch looks at the files. A Kubernetes volume follows its ConfigMap within a
// minute or two, so a shorter interval is useless.
const Every = 10 * time.Second

// Live is the configuration of a running process.
type Live struct {
	source  Source
	seen    contents
	current Settings

	mu      sync.Mutex
	usable  bool
	restart bool
}

// Open reads the configuration that a process starts with.
func Open(s Source) (*Live, error) {
	l := &Live{source: s, seen: s.read(), usable: true}
	var err error
	l.current, err = l.seen.settings(s)
	return l, err
}

// Settings returns the settings that the process started with.
func (l *Live) Settings() Settings { return l.current }

// State reports whether the files were valid when last read, and whether they contain changes that
// need a restart.
func (l *Live) State() (usable, restart bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usable, l.restart
}

// Changes receives what changes while the process runs.
type Changes struct {
	AllowDevices func(patterns []string) error
	Verbosity    func(int)
	Log          *slog.Logger
}

// Watch rereads the files when they have changed, and on each signal in asked, until ctx ends. It
// compares their content: the kubelet exchanges symbolic links, others rename or write.
func (l *Live) Watch(ctx context.Context, to Changes, asked <-chan os.Signal, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		force := false
		select {
		case <-ctx.Done():
			return
		case <-asked:
			force = true
		case <-tick.C:
		}
		if now := l.source.read(); force || !now.same(l.seen) {
			l.seen = now
			l.reload(to)
		}
	}
}

// reload applies what is safe: the allowed devices, and the log level. Pools wait for a restart: a
// removed pool has mounted volumes, and an added one changes where new volumes go.
func (l *Live) reload(to Changes) {
	next, err := l.seen.settings(l.source)
	if err == nil && !slices.Equal(next.AllowDevices, l.current.AllowDevices) {
		err = to.AllowDevices(next.AllowDevices)
	}
	if err != nil {
		l.set(false, l.restart)
		to.Log.Error("the configuration cannot be used: csi-node goes on with what it has", "error", err)
		return
	}
	restart := !slices.Equal(next.Pools, l.current.Pools)
	to.Verbosity(next.Verbosity)
	l.current.AllowDevices, l.current.Verbosity, l.current.Entry = next.AllowDevices, next.Verbosity, next.Entry
	l.set(true, restart)
	to.Log.Info("the configuration was read again", "file", l.source.File, "entry", next.Entry,
		"allow_devices", next.AllowDevices, "verbosity", next.Verbosity)
	if restart {
		to.Log.Warn(
			"the pools in the configuration have changed: restart csi-node to use them. Until then it has those that it started with",
			"file", l.source.File, "has", l.current.Pools, "configured", next.Pools)
	}
}

func (l *Live) set(usable, restart bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.usable, l.restart = usable, restart
}
