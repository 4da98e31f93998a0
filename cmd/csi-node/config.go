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

// asksToReread returns a channel that gets SIGHUP. It is made before anything is served: while nobody catches the signal, it kills the
// process, and the calls in flight with it, also where there is no configuration file.
func asksToReread() <-chan os.Signal {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, linux.SIGHUP)
	return asked
}

// watchConfig applies changes of the configuration file until it is stopped.
func watchConfig(
	config *nodeconfig.Live, asked <-chan os.Signal, devices *static.Source, level *slog.LevelVar, log *slog.Logger,
	metrics *telemetry.Metrics,
) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
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
	}
}
