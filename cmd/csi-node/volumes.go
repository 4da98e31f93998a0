package main

import (
	"log/slog"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/nodeconfig"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/pkg/driver"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
	"github.com/crust-csi/crust-csi/pkg/volume/static"
)

// poolRecords is the directory of the node's records of its pools.
func poolRecords(o *options) string { return filepath.Join(o.stateDir, "pools") }

// openVolumes opens the pools and the registry of static volumes.
func openVolumes(
	o *options, settings nodeconfig.Settings, log *slog.Logger, metrics *telemetry.Metrics,
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
	neighbours := &looppool.Neighbours{}
	for _, spec := range settings.Pools {
		p, err := poolhome.Open(poolhome.Options{
			Name: spec.Name, Dir: spec.Dir, State: poolRecords(o), Log: log, Empty: looppool.Empty,
			Foreign: looppool.Foreign(nodes),
			Open: func() (volume.Pool, error) {
				return looppool.Open(looppool.Options{
					Name: spec.Name, Dir: spec.Dir, NodesDir: nodes, Log: log, Copied: metrics.Copied(spec.Name),
					Overcommit: spec.Overcommit, Reserve: spec.Reserve, Neighbours: neighbours,
				})
			},
		})
		if err != nil {
			closeAll()
			return nil, nil, nil, err
		}
		pools = append(pools, p)
		metrics.Pool(spec.Name, func() (telemetry.PoolBytes, error) {
			if err := p.Hangs(); err != nil {
				return telemetry.PoolBytes{}, err
			}
			c, err := p.Capacity()
			return telemetry.PoolBytes{
				Size: c.Total, Available: c.Available, Used: c.Used, Promised: c.Promised, Left: c.Left, Reserve: c.Reserve,
			}, err
		})
	}
	st, err := static.Open(static.Options{
		Dir: filepath.Join(o.stateDir, "static"), Allow: settings.AllowDevices,
		ToAllow:  "; allow it with --allow-device, or with allowDevices in the file of --config",
		NodesDir: nodes, Log: log,
		Claimed: func(d mounter.Device) (string, bool, error) { return volume.OwnerOfDevice(pools, d) },
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

// formerPools returns the pools that the node had before.
func formerPools(records string, now []volume.Pool) ([]driver.FormerPool, error) {
	var names []string
	for _, p := range now {
		names = append(names, p.Name())
	}
	all, err := poolhome.FormerPools(records, names)
	var former []driver.FormerPool
	for _, p := range all {
		former = append(former, driver.FormerPool{Name: p.Name, Dir: p.Dir, Record: p.Record,
			Empty: func() error {
				if err := p.Here(); err != nil {
					return err
				}
				return looppool.Empty(p.Dir)
			}})
	}
	return former, err
}
