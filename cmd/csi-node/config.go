package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/nodeconfig"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/pkg/volume/static"
)

// watchConfig applies changes of the configuration file until it is stopped.
func watchConfig(
	config *nodeconfig.Live, devices *static.Source, level *slog.LevelVar, log *slog.Logger, metrics *telemetry.Metrics,
) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, linux.SIGHUP)
	metrics.Config(config.State)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		config.Watch(ctx, nodeconfig.Changes{
			AllowDevices: devices.Allow, Log: log,
			Verbosity: func(v int) { level.Set(rpcserver.LevelOf(v)) },
		}, asked, nodeconfig.Every)
	}()
	return func() {
		cancel()
		<-ended
		signal.Stop(asked)
	}
}
