package main

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/nodeconfig"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
	"github.com/crust-csi/crust-csi/pkg/volume/static"
)

// disks are the pools that were opened, by name: a pool that was away is opened when it comes.
type disks struct {
	mu     sync.Mutex
	m      map[string]*looppool.Pool
	silent map[string][]time.Time // when the writes began that are not back, by pool; the oldest first
}

func newDisks() *disks {
	return &disks{m: map[string]*looppool.Pool{}, silent: map[string][]time.Time{}}
}

// hangAfter is how long a small write may take before the metrics call the pool unreadable. It is
// as long as calls wait.
const hangAfter = 5 * time.Second

// hangs tells of a pool whose disk was asked by some call, and has not answered.
func (d *disks) hangs(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if all := d.silent[name]; len(all) > 0 && time.Since(all[0]) > hangAfter {
		return fmt.Errorf("pool %s has not answered since %s", name, all[0].UTC().Format(time.RFC3339))
	}
	return nil
}

func (d *disks) open(o looppool.Options) (volume.Pool, error) {
	p, err := looppool.Open(o)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.m[o.Name] = p
	return p, nil
}

// answers is driver.Config.Answers. A pool that was never there has no disk to ask.
func (d *disks) answers(name string) error {
	d.mu.Lock()
	p, began := d.m[name], time.Now()
	if p == nil {
		d.mu.Unlock()
		return nil
	}
	d.silent[name] = append(d.silent[name], began)
	d.mu.Unlock()
	err := p.Answers()
	d.mu.Lock()
	defer d.mu.Unlock()
	at := slices.Index(d.silent[name], began)
	d.silent[name] = slices.Delete(d.silent[name], at, at+1)
	return err
}

// openVolumes opens the pools, and what knows static volumes.
func openVolumes(
	o *options, settings nodeconfig.Settings, log *slog.Logger, metrics *telemetry.Metrics, disks *disks,
) (*volume.Registry, *static.Source, func(), error) {
	var pools []volume.Pool
	closeAll := func() {
		for _, p := range pools {
			if err := p.Close(); err != nil {
				log.Warn("closing a pool", "pool", p.Name(), "error", err)
			}
		}
	}
	nodes := filepath.Join(o.stateDir, "dev")
	for _, spec := range settings.Pools {
		p, err := poolhome.Open(poolhome.Options{
			Name: spec.Name, Dir: spec.Dir, State: filepath.Join(o.stateDir, "pools"), Log: log, Empty: looppool.Empty,
			Open: func() (volume.Pool, error) {
				return disks.open(looppool.Options{
					Name: spec.Name, Dir: spec.Dir, NodesDir: nodes, Log: log, Copied: metrics.Copied(spec.Name),
					Overcommit: spec.Overcommit, Reserve: spec.Reserve,
				})
			},
		})
		if err != nil {
			closeAll()
			return nil, nil, nil, err
		}
		pools = append(pools, p)
		metrics.Pool(spec.Name, func() (telemetry.PoolBytes, error) {
			if err := disks.hangs(spec.Name); err != nil {
				return telemetry.PoolBytes{}, err
			}
			c, err := p.Capacity()
			return telemetry.PoolBytes{
				Size: c.Total, Available: c.Available, Used: c.Used, Promised: c.Promised, Left: c.Left, Reserve: c.Reserve,
			}, err
		})
	}
	st, err := static.Open(static.Options{
		Dir: filepath.Join(o.stateDir, "static"), Allow: settings.AllowDevices, NodesDir: nodes, Log: log,
		Claimed: func(d mounter.Device) (string, bool) {
			for _, p := range pools {
				if id, ok := p.Owns(d); ok {
					return id, true
				}
			}
			return "", false
		},
	})
	if err == nil {
		var r *volume.Registry
		if r, err = volume.NewRegistry(st, pools...); err == nil {
			return r, st, closeAll, nil
		}
	}
	closeAll()
	return nil, nil, nil, err
}
