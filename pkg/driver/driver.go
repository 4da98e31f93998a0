// Package driver implements the CSI semantics: what a request means, whether it is allowed now, and
// which result it has. It makes no system call: pkg/mounter does that. It knows no kind of pool:
// pkg/volume has them.
package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// DefaultName is the name under which a driver registers by default.
const DefaultName = "csi.crust.dev"

// Config configures a Driver. It needs Name, NodeID, StateDir, Root and Volumes.
type Config struct {
	Name     string // of the CSI driver
	Version  string
	NodeID   string        // 1 to 192 bytes
	StateDir string        // for the records of this driver; created if it does not exist
	Root     *mounter.Root // the directory above every staging and target path
	Volumes  *volume.Registry
	Programs *fsprogs.Programs // nil: those of fsprogs.New
	Log      *slog.Logger      // nil: no log
	Metrics  Metrics           // nil: none
	Audit    *AuditLog         // nil: no audit log
	// AppliesGroups: the driver applies the pod's fsGroup itself (VOLUME_MOUNT_GROUP). Otherwise
	// the orchestrator does.
	AppliesGroups bool
	// ToApplyGroups says how an administrator lets the driver apply groups; appended to refusals.
	ToApplyGroups string
	// NodesExpand: the controller does not offer EXPAND_VOLUME. So an orchestrator leaves growth to
	// NodeExpandVolume, which then enlarges the pool's volume too. One external-resizer serves all
	// nodes, but only a volume's own node can enlarge it.
	NodesExpand bool
	// Defers: pods' runtimes mount volumes whose class allows it, if they can (KEP-2857).
	Defers bool
	// Left returns what releases a volume whose pool is no longer configured here, nil if nothing
	// can. Left may be nil.
	Left func(id string) volume.Releaser
	// FormerPools returns the pools with which this node was configured before, and which may have volumes. FormerPools may be nil.
	FormerPools func() ([]FormerPool, error)
	// HostNamespace is the host's mount namespace, where container runtimes look for targets. nil:
	// this process's own.
	HostNamespace *mounter.Namespace
	// HostNetwork is the host's network namespace, in which shares are mounted: this process's may
	// end before they do. nil: this process's own.
	HostNetwork *os.File
}

// FormerPool is a pool with which a node was configured before.
type FormerPool struct {
	Name, Dir string // Dir is empty if it is unknown
	Record    string // the file by which the node knows of it
	// Empty returns nil if the pool certainly has no volume and no snapshot. It may hang with the pool's disk.
	Empty func() error
}

// Metrics records what happened; package telemetry has an implementation.
type Metrics interface {
	FilesystemMade(fstype string)
	FilesystemChecked(outcome string)
	FilesystemGrown(fstype, how string)
	OwnershipApplied(strategy string, took time.Duration, looked, changed int64)
	OwnershipSkipped(reason string)
	ContextMount(outcome, accessMode string)
	ReadOnlyPublish(applied string)
}

// Driver serves the CSI Identity, Controller and Node services.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer

	Config
	ops       *operations
	staged    *stagedVolumes
	published *publishedTargets
	deferrals *deferrals
	damaged   damagedVolumes
	readers   *readers
	lost      lostWrites
	users     users
	topology  string

	conditions conditions
	refused    refusedGrowth
	walks      walks
	answered   answered

	unknownPools names // that GetCapacity was asked for
}

// noMetrics is used if Config.Metrics is nil.
type noMetrics struct{}

func (noMetrics) FilesystemMade(string)                                {}
func (noMetrics) FilesystemChecked(string)                             {}
func (noMetrics) FilesystemGrown(_, _ string)                          {}
func (noMetrics) OwnershipApplied(string, time.Duration, int64, int64) {}
func (noMetrics) OwnershipSkipped(string)                              {}
func (noMetrics) ContextMount(_, _ string)                             {}
func (noMetrics) ReadOnlyPublish(string)                               {}

// complete refuses a Config that lacks something, and fills in what may be left out.
func (cfg *Config) complete() error {
	switch {
	case cfg.NodeID == "" || len(cfg.NodeID) > 192:
		return fault.New(fault.Invalid, "node id %q: give one of 1 to 192 bytes", cfg.NodeID)
	case cfg.Name == "":
		return fault.New(fault.Invalid, "the driver has no name")
	case cfg.StateDir == "" || cfg.Root == nil || cfg.Volumes == nil:
		return fault.New(fault.Invalid, "driver %s: give a directory for its records, a root, and a registry of volumes", cfg.Name)
	}
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.Programs = cmp.Or(cfg.Programs, fsprogs.New(nil))
	if cfg.Metrics == nil {
		cfg.Metrics = noMetrics{}
	}
	return nil
}

// New continues where an earlier process stopped: it undoes unfinished work, and reads once from
// the mount table what is published. A Config that lacks something is a fault Invalid.
func New(cfg Config) (*Driver, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	boot, err := mounter.BootID()
	if err != nil {
		return nil, err
	}
	d := &Driver{
		Config: cfg, ops: newOperations(cfg.Log), readers: newReaders(cfg.Log),
		topology: "topology." + cfg.Name + "/node",
	}
	if d.staged, err = loadStaged(filepath.Join(cfg.StateDir, "staged"), boot, cfg.Log); err != nil {
		return nil, err
	}
	if d.published, err = loadPublished(filepath.Join(cfg.StateDir, "published"), boot, cfg.Log); err != nil {
		return nil, err
	}
	if d.deferrals, err = loadDeferrals(filepath.Join(cfg.StateDir, "deferred"), boot); err != nil {
		return nil, err
	}
	if err := d.recover(); err != nil {
		return nil, err
	}
	return d, d.identifyDeferrals()
}

// Drain cancels operations that outlived their callers, and waits for them until ctx ends.
func (d *Driver) Drain(ctx context.Context) { d.ops.drain(ctx) }

func (d *Driver) recover() error {
	var errs []error
	for _, p := range d.Volumes.Pools() {
		if err := p.Recover(d.thaw); err != nil {
			errs = append(errs, fmt.Errorf("pool %s: %w", p.Name(), err))
		}
	}
	if err := d.clearScratch(); err != nil {
		errs = append(errs, err)
	}
	if static := d.Volumes.Static(); static != nil {
		// Teach Owns the devices of staged static volumes.
		for id, r := range d.staged.all() {
			_, err := static.Get(id)
			// Use the number: the path may name another device by now.
			if r.Share == "" && (err == nil || errors.Is(err, volume.ErrUnusable)) {
				static.Remember(id, r.Device)
			}
		}
	}
	table, err := d.Root.Table()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	d.recall(table)
	for _, m := range table {
		id, ok, err := d.owner(m)
		switch {
		case ok:
			d.published.add(id, m.Path)
		case err != nil: // one bad device must not stop service to other volumes
			d.Log.Error("which volume is mounted here is not known yet", "target", m.Path, "error", err)
			d.published.addUnidentified(m)
		case m.Part && onDevice(m):
			d.published.addUnidentified(m) // a raw block volume of another driver, or of a pool that is not configured any more
		}
	}
	return errors.Join(errs...)
}

// onDevice tells whether a mount shows a block device's node.
func onDevice(m mounter.Mount) bool {
	_, ok, err := m.Device()
	return ok && err == nil
}

// scratchFor returns a directory where a helper program may mount briefly.
func (d *Driver) scratchFor(id string) string {
	return filepath.Join(d.StateDir, "scratch", strings.TrimSuffix(filepath.Base(d.staged.path(id)), record.Extension))
}

func (d *Driver) clearScratch() error {
	left, err := filepath.Glob(filepath.Join(d.StateDir, "scratch", "*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range left {
		errs = append(errs, mounter.ClearScratch(dir))
	}
	return errors.Join(errs...)
}

// sources returns all sources of volumes.
func (d *Driver) sources() []volume.Source {
	var all []volume.Source
	for _, p := range d.Volumes.Pools() {
		all = append(all, p)
	}
	if s := d.Volumes.Static(); s != nil {
		all = append(all, s)
	}
	return all
}

func (d *Driver) owner(m mounter.Mount) (string, bool, error) {
	dev, onDevice, err := m.Device()
	if err != nil || onDevice {
		id, ok := "", false
		if err == nil {
			dev, err = rawdevice.Below(dev)
		}
		if err == nil {
			id, ok, err = volume.OwnerOfDevice(d.sources(), dev)
		}
		if ok {
			return id, true, nil
		}
		for id, r := range d.staged.all() {
			same := r.Share == "" && (r.Device.Same(dev) || !onDevice && r.Device.Path == dev.Path)
			if same && (err != nil || d.Volumes.CheckPool(id) != nil) {
				return id, true, nil // its pool is no longer configured, or cannot be asked
			}
		}
		return "", false, err
	}
	if !isShare(m.Source) {
		return "", false, nil
	}
	var shares, found []string
	for id, r := range d.staged.all() {
		if r.Share != "" {
			shares = append(shares, id)
		}
		if r.Share != "" && sameShare(r.Share, m.Source) {
			found = append(found, id)
		}
	}
	// Of several volumes of one share, the mount does not tell which, and it may show the name of another one's server.
	if id, ok := d.published.recordedAs(shares, m.Path); ok {
		return id, true, nil
	}
	if len(found) == 1 {
		return found[0], true, nil
	}
	return "", false, nil
}

// isShare reports whether a mount's source is SERVER:/SHARE. Which it is need not be what was mounted: mounts of one server share a
// superblock, so the kernel shows the name by which the first of them called the server; and the server may have followed a link.
func isShare(source string) bool { return strings.Contains(source, ":/") }

// sameShare reports whether two sources SERVER:/SHARE are one share. The kernel shows the path cleaned: no slash at its end, none doubled.
func sameShare(a, b string) bool {
	clean := func(s string) string {
		server, share, ok := strings.Cut(s, ":/")
		if !ok {
			return s
		}
		return server + ":" + path.Clean("/"+share)
	}
	return clean(a) == clean(b)
}

// quiesce stops writes to a volume while it is copied.
func (d *Driver) quiesce(s volume.Source, id string) volume.Quiesce {
	return func(ctx context.Context) (volume.Stillness, error) {
		still := volume.Stillness{Resume: func() error { return nil }}
		if err := d.notDeferred(id); err != nil {
			return still, fmt.Errorf("a consistent copy is possible only when the sandbox no longer has it: %w", err)
		}
		a, ok, err := s.Attached(id)
		if err != nil || !ok {
			return still, err
		}
		busy, err := d.busy(id, a.Device.Path)
		if err != nil {
			return still, err
		}
		v, err := s.Get(id)
		if err != nil {
			return still, err
		}
		if r, _ := d.staged.get(id); !busy || v.Facts.Formatted == "" || r.Block {
			still.Writers = d.rawWriters(s, id, a.Device, busy)
			still.Written = func() (mounter.Written, error) { return mounter.WrittenTo(a.Device) }
			err := mounter.Flush(a.Device)
			d.noteLost(ctx, id, err)
			return still, err
		}
		if err := d.withheldHere(s, id, "frozen"); err != nil {
			return still, err
		}
		fs, err := d.live(a.Device, id, v.Facts.Formatted)
		if err != nil {
			return still, err
		}
		still.Resume, err = mounter.Freeze(fs)
		return still, err
	}
}

// rawWriters says who may write to a volume's raw device, empty for nobody. A target that cannot be
// examined counts.
func (d *Driver) rawWriters(s volume.Source, id string, dev mounter.Device, busy bool) string {
	for _, path := range d.publishedAt(s, id) {
		if !d.readsOnly(s, id, path) {
			return "it is published as a writable block device at " + path
		}
	}
	if busy {
		who := mounter.HeldBy(dev)
		d.Log.Info("a device is held", "volume_id", id, "device", dev.Path, "detail", who.Detail)
		return "a process holds " + dev.Path + " for itself" + who.After("; ").Public
	}
	return ""
}

// readsOnly tells whether a target certainly shows the volume through a read-only device.
func (d *Driver) readsOnly(s volume.Source, id, path string) bool {
	t, state, err := d.look(path)
	if err != nil {
		return false
	}
	defer t.Close()
	defer state.Close()
	ours, dev, err := d.shows(state, s, id, path)
	return err == nil && ours && mounter.ReadOnlyDevice(dev)
}

// live returns the options for the driver's own second mount of a volume that may be mounted. They
// are those of the live superblock: the kernel refuses another SELinux label, or none.
func (d *Driver) live(dev mounter.Device, id, fstype string) (mounter.Filesystem, error) {
	r, _ := d.staged.get(id)
	o, err := mounter.ParseOptions([]string{r.Superblock})
	if err != nil {
		return mounter.Filesystem{}, fmt.Errorf("volume %s: the options of its mounts, as recorded: %w", id, err)
	}
	fs := filesystem(dev, fstype, o, false)
	fs.Scratch, fs.NoPanic = d.scratchFor(id), true
	return fs, nil
}

// filesystem says how to mount a volume's file system. A clone of an xfs has its origin's UUID;
// without nouuid the kernel would not mount both.
func filesystem(dev mounter.Device, name string, o mounter.Options, readOnly bool) mounter.Filesystem {
	if besides := fstype.Of(name).Copy; besides != "" {
		o = o.With(besides, "")
	}
	return mounter.Filesystem{Device: dev, Type: name, Options: o, ReadOnly: readOnly}
}
