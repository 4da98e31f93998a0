// Command csi-node is the CSI server of a node: Identity, Controller (volumes of this node) and
// Node, on a unix socket.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/confine"
	"github.com/crust-csi/crust-csi/internal/daemon"
	"github.com/crust-csi/crust-csi/internal/nodeconfig"
	"github.com/crust-csi/crust-csi/internal/privatesocket"
	"github.com/crust-csi/crust-csi/internal/privilege"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/internal/registration"
	"github.com/crust-csi/crust-csi/internal/rpcserver"
	"github.com/crust-csi/crust-csi/internal/statedir"
	"github.com/crust-csi/crust-csi/internal/telemetry"
	"github.com/crust-csi/crust-csi/internal/tracing/otlp"
	"github.com/crust-csi/crust-csi/internal/version"
	"github.com/crust-csi/crust-csi/pkg/driver"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
)

func main() { daemon.Main("csi-node", run) }

func run(args []string) error {
	o, err := parseFlags(args)
	if err != nil {
		return err
	}
	if o.Version {
		fmt.Println(version.String())
		return nil
	}
	if o.checkConfig {
		text, err := o.config.Describe()
		fmt.Print(text)
		return err
	}
	if err := privilege.Keep(o.capabilities); err != nil {
		return err
	}
	asked := asksToReread()
	config, err := nodeconfig.Open(o.config)
	if err != nil {
		return err
	}
	level := &slog.LevelVar{}
	level.Set(rpcserver.LevelOf(config.Settings().Verbosity))
	log := rpcserver.LoggerAt(os.Stderr, o.LogFormat, level)
	traces := otlp.Start("csi-node", version.String(), log)
	defer traces.Stop()
	log = traces.Logger(log)
	sayMissing(log)
	metrics := telemetry.New(version.String())
	metrics.Expect(fstype.Formats(), fstype.Programs(), fsprogs.Outcomes())
	// Before anything is read or recovered: another process may be using it.
	lock, err := statedir.Lock(o.stateDir, "csi-node")
	if err != nil {
		return err
	}
	defer lock.Close()
	root, err := mounter.OpenRoot(o.kubeletDir)
	if err != nil {
		return fmt.Errorf("--kubelet-dir: %w; give the directory of this node's kubelet, or create it", err)
	}
	defer root.Close()
	volumes, devices, closePools, err := openVolumes(o, config.Settings(), log, metrics)
	if err != nil {
		return err
	}
	defer closePools()
	if len(config.Settings().Pools) == 0 {
		log.Warn("this node has no pools, so no volumes are made here")
	}
	if o.config.File != "" {
		stop := watchConfig(config, asked, devices, level, log, metrics)
		defer stop()
	}
	log.Info("starting", "version", version.String(), "driver", o.driverName, "node_id", o.nodeID, "features",
		mounter.Summary(mounter.Features()))
	log.Info(rawdevice.Describe(filepath.Join(o.stateDir, "dev")))
	host, err := openHostNamespace(o, log)
	if err != nil {
		return err
	}
	history, err := driver.OpenAuditLog(o.stateDir)
	if err != nil {
		return fmt.Errorf("--state-dir: the audit log: %w", err)
	}
	defer func() {
		if err := history.Close(); err != nil {
			log.Warn("closing the audit log", "error", err)
		}
	}()
	programs := fsprogs.New(metrics.ProgramStarted)
	programs.Scratch = o.stateDir
	if err := programs.Clear(); err != nil {
		log.Warn("copies of metadata are left", "error", err)
	}
	if f := programs.ProbeConfinement(); f.Answer != mounter.Yes {
		log.Warn("programs of file systems cannot be confined, so they are not run", "without", f.Cost, "error", f.Why)
	}
	if err := confine.Cgroups(); err != nil {
		log.Info("programs of file systems have no cgroup of their own; only their address space is limited", "error", err)
	}
	d, err := driver.New(driver.Config{
		Name: o.driverName, Version: version.String(), NodeID: o.nodeID, StateDir: o.stateDir, Root: root, Volumes: volumes,
		Programs: programs, Log: log, Metrics: metrics, Audit: history,
		NodesExpand:   o.expansion == "node",
		ToApplyGroups: "; start csi-node with --fsgroup-policy Mount, it has --fsgroup-policy File",
		AppliesGroups: o.fsGroupPolicy == "Mount", Defers: o.defers, HostNamespace: host, HostNetwork: openHostNetwork(o, log),
		Left: func(id string) volume.Releaser {
			return looppool.Left(id, filepath.Join(o.stateDir, "dev"), func(d mounter.Device) (bool, error) {
				owner, ok, err := volume.AvailableOwnerOfDevice(volumes.Pools(), d)
				if err != nil || !ok {
					return false, err
				}
				same, err := poolhome.SameVolume(poolRecords(o), id, owner)
				return !same, err
			})
		},
		FormerPools: func() ([]driver.FormerPool, error) { return formerPools(poolRecords(o), volumes.Pools()) },
	})
	if err != nil {
		return err
	}
	metrics.Volumes(func() telemetry.Volumes { return needingAttention(d) }, d.Walks)
	if err := d.Ready(); err != nil {
		log.Warn("not ready yet", "error", err)
	}
	if o.idmapProbe {
		probeIdmaps(context.Background(), o, log, metrics)
	}
	return serve(o, log, metrics, d, traces.Server())
}

// sayMissing logs what will not work because a capability is missing.
func sayMissing(log *slog.Logger) {
	missing, err := privilege.Storage.Missing("/proc/self/status")
	if err != nil {
		log.Warn("which capabilities are held cannot be told", "error", err)
	}
	for _, n := range missing {
		log.Warn("CAP_"+n.Name+" is not held", "without", n.Without)
	}
}

// openHostNamespace opens the host's mount namespace; nil means this process's own.
func openHostNamespace(o *options, log *slog.Logger) (*mounter.Namespace, error) {
	// A driver that no longer defers volumes still ends earlier deferrals.
	if o.hostNamespace != "" {
		ns, err := mounter.OpenNamespace(o.hostNamespace)
		if err != nil && !o.defers {
			log.Warn("volumes that were left to sandboxes before cannot be unpublished", "error", err)
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("--host-mount-namespace: %w", err)
		}
		return ns, nil
	}
	ns, err := mounter.OpenNamespace("/proc/1/ns/mnt")
	if err != nil {
		log.Info("the host's mount namespace is taken to be this process's own; if it is not, give --host-mount-namespace", "error", err)
		return nil, nil
	}
	return ns, nil
}

// openHostNetwork opens the host's network namespace, next to its mount namespace; nil means this
// process's own.
func openHostNetwork(o *options, log *slog.Logger) *os.File {
	path := filepath.Join(filepath.Dir(cmp.Or(o.hostNamespace, "/proc/1/ns/mnt")), "net")
	f, err := os.Open(path)
	if err != nil {
		log.Info("NFS shares are mounted in this process's network namespace", "error", err)
		return nil
	}
	return f
}

// probeIdmaps tries an idmapped mount of each file system that can be formatted, and logs the
// results.
func probeIdmaps(ctx context.Context, o *options, log *slog.Logger, metrics *telemetry.Metrics) {
	programs := fsprogs.New(metrics.ProgramStarted)
	var list []mounter.Feature
	for _, fs := range fstype.Formats() {
		list = append(list, programs.ProbeIdmap(ctx, fs, o.stateDir, filepath.Join(o.stateDir, "dev")))
	}
	log.Info("user namespaces", "features", mounter.Summary(list))
}

// needingAttention returns what the metrics show about single volumes.
func needingAttention(d *driver.Driver) telemetry.Volumes {
	var v telemetry.Volumes
	unhealthy, waiting := d.Conditions()
	for _, u := range unhealthy {
		v.Unhealthy = append(v.Unhealthy, telemetry.Unhealthy(u))
	}
	for _, g := range waiting {
		v.Growth = append(v.Growth, telemetry.Growth(g))
	}
	return v
}

func serve(o *options, log *slog.Logger, metrics *telemetry.Metrics, d *driver.Driver, options []grpc.ServerOption) error {
	servers := daemon.NewServers(log)
	defer servers.Close()
	l, err := privatesocket.Listen(o.endpoint, 0o600)
	if err != nil {
		return err
	}
	s := rpcserver.New(log, metrics, options...)
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	d.RegisterInventory(s)
	var registered atomic.Pointer[registration.Server]
	ready := func() error {
		errs := []error{privilege.Storage.Ready(), d.Ready()}
		if r := registered.Load(); r != nil {
			errs = append(errs, r.Err())
		} else if o.registration != "" {
			errs = append(errs, errors.New("not yet registered with the kubelet"))
		}
		return errors.Join(errs...)
	}
	if err := servers.HTTP(o.MetricsAddress, metrics.Handler(ready)); err != nil {
		return errors.Join(err, l.Close())
	}
	// What can fail comes before the first call, which would be cut off. Until then clients wait at the socket.
	if o.endpointGroup >= 0 {
		if err := rpcserver.ShareSocket(o.endpoint, o.endpointGroup); err != nil {
			return errors.Join(fmt.Errorf("--endpoint-group: %w", err), l.Close())
		}
	}
	if o.registration != "" {
		r, err := registration.Serve(o.registration, o.driverName, o.endpoint, log)
		if err != nil {
			return errors.Join(err, l.Close())
		}
		defer r.Stop()
		servers.Needs(r.Socket())
		registered.Store(r)
	}
	servers.GRPC(s, l)
	log.Info("serving", "endpoint", o.endpoint)
	return servers.Wait("calls in flight are finished", d.Drain)
}
