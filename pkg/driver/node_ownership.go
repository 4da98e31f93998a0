package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// group returns the pod's fsGroup, from either source; nil if there is none, or if the orchestrator
// applies it.
func (d *Driver) group(c *csi.VolumeCapability, a attributes) (*uint32, error) {
	mountGroup := c.GetMount().GetVolumeMountGroup()
	if !d.AppliesGroups {
		if mountGroup != "" {
			return nil, invalid("volume_mount_group %q: this driver leaves groups to the orchestrator and does not offer VOLUME_MOUNT_GROUP%s",
				mountGroup, d.ToApplyGroups)
		}
		return nil, nil
	}
	text := mountGroup
	if text == "" {
		text = a.podGroup
	}
	if text == "" {
		return nil, nil
	}
	if a.podGroup != "" && a.podGroup != text {
		return nil, invalid("volume_mount_group is %q and the attribute %s is %q: one pod has one fsGroup",
			mountGroup, attrPodGroup, a.podGroup)
	}
	gid, err := ownership.ParseGroup(text)
	if err != nil {
		return nil, err
	}
	return &gid, nil
}

// Values of fsGroupStrategy.
const (
	strategyChown  = "chown"
	strategyIdmap  = "idmap"
	strategyOption = "option"
)

// strategy chooses how the group is applied.
func (d *Driver) strategy(p *publication) (string, error) {
	asked := p.attrs.FSGroupStrategy
	switch {
	case p.group == nil || p.use.block || p.attachment.Share != nil:
		return "", nil
	case fstype.Of(p.staged.FSType).GroupByOption:
		if asked != "" && asked != strategyOption {
			return "", invalid("volume %s: fsGroupStrategy=%s cannot be had on %s, whose files have no owners on disk; use %s", p.id, asked,
				p.staged.FSType, strategyOption)
		}
		return strategyOption, nil
	case asked == strategyOption:
		return "", invalid("volume %s: fsGroupStrategy=option is for %s; %s has owners on disk, use chown or idmap", p.id,
			strings.Join(fstype.WithGroupOption(), ", "), p.staged.FSType)
	case asked == strategyIdmap && p.attrs.ownUserns:
		// A mount is id-mapped only once, and the runtime will.
		d.Log.Info("the pod has a user namespace, so its fsGroup is applied by chown and not by idmap", "volume_id", p.id, "target_path",
			p.target)
		return strategyChown, nil
	case asked == strategyIdmap:
		return strategyIdmap, nil
	}
	return strategyChown, nil
}

// walkable tells whether a publish may change the group of files, with the help of inode tables.
func (p *publication) walkable() bool {
	return p.group != nil && p.strategy != strategyOption && !p.readOnly && fstype.Of(p.staged.FSType).InodeTables
}

// groupOptions adds the group to the superblock options of a file system that takes it there.
func (p *publication) groupOptions() error {
	if p.strategy != strategyOption {
		return nil
	}
	o, err := p.use.options.WithGroup(*p.group)
	if err != nil {
		return fmt.Errorf("volume %s: %w", p.id, err)
	}
	p.use.options = o
	return nil
}

// applyGroup gives a detached mount to the pod's group, and returns the id map to show it with.
func (d *Driver) applyGroup(ctx context.Context, p *publication, m *mounter.Detached, progress *volume.Progress) (*mounter.IDMap, error) {
	if !d.AppliesGroups && !p.readOnly && !fstype.Of(p.staged.FSType).GroupByOption {
		d.doubt(p, m)
	}
	if p.group == nil {
		d.Metrics.OwnershipSkipped("no-group")
		return nil, nil
	}
	if p.strategy == strategyOption {
		return nil, nil
	}
	root, err := m.Dir()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	if p.strategy == strategyIdmap {
		record, known, err := ownership.State(root)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", p.id, err)
		}
		if known && record.Clean && p.attrs.FSGroupChangePolicy != ownership.Always {
			d.Metrics.OwnershipSkipped("record")
			return showing(record.Group, *p.group), nil
		}
		if known && !p.readOnly {
			// Keep the volume's own group, which other publishes may show.
			return showing(record.Group, *p.group), d.walk(ctx, p, root, record.Group, progress)
		}
	}
	if p.readOnly {
		d.Metrics.OwnershipSkipped("read-only")
		return nil, nil
	}
	return nil, d.walk(ctx, p, root, *p.group, progress)
}

// doubt invalidates the record of the files' group if the orchestrator applies groups: it does not
// say when, and may be stopped midway.
func (d *Driver) doubt(p *publication, m *mounter.Detached) {
	root, err := m.Dir()
	if err == nil {
		err = errors.Join(ownership.Doubt(root), root.Close())
	}
	if err != nil {
		d.Log.Warn("the record of the volume's group is left as it is, though the kubelet may give its files to another",
			"volume_id", p.id, "error", err)
	}
}

func showing(disk, shown uint32) *mounter.IDMap {
	if disk == shown {
		return nil
	}
	m := mounter.ShowGroup(disk, shown)
	return &m
}

const progressInterval = 10 * time.Second

// walk runs ownership.Apply, and reports its progress.
func (d *Driver) walk(ctx context.Context, p *publication, root *os.File, gid uint32, progress *volume.Progress) (err error) {
	policy := p.attrs.FSGroupChangePolicy
	if policy == "" {
		policy = ownership.OnRootMismatch
	}
	due, err := ownership.Due(root, gid, policy)
	if err != nil {
		return fmt.Errorf("volume %s: %w", p.id, err)
	}
	if !due {
		d.Metrics.OwnershipSkipped("record")
		return nil
	}
	begin := time.Now()
	var counts ownership.Progress
	usage, err := mounter.UsageOf(root)
	if err != nil {
		return err
	}
	counted := func() string {
		looked := counts.Looked.Load()
		return fmt.Sprintf("%d files looked at, %d changed for group %d, %.0f files/s", looked, counts.Changed.Load(), gid,
			float64(looked)/time.Since(begin).Seconds())
	}
	describe := func() string {
		// btrfs does not count its files, and files may be added meanwhile.
		looked := counts.Looked.Load()
		if left := usage.UsedInodes - looked; left > 0 && looked > 0 {
			return counted() + fmt.Sprintf(", about %s left",
				time.Duration(float64(time.Since(begin))/float64(looked)*float64(left)).Round(time.Second))
		}
		return counted() + ", how long it will take cannot be told"
	}
	progress.Describe(describe)
	walked := d.walks.begin(&walk{volume: p.id, name: p.volume.Name, pod: p.pod, podUID: p.podUID, since: begin,
		progress: describe, result: counted})
	defer func() { walked(err) }()
	ticker := time.NewTicker(progressInterval)
	defer ticker.Stop()
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case <-ticker.C:
				d.Log.Info("giving a volume to a group", "volume_id", p.id, "progress", describe())
			case <-done:
				return
			}
		}
	}()
	var inodes ownership.Inodes
	if p.alone {
		inodes = ownership.InodesOf(p.attachment.Device.Path, p.staged.FSType)
	}
	actx, end := tracing.Begin(ctx, "give files to group", tracing.Volume(p.id))
	r, err := ownership.Apply(actx, root, gid, policy, inodes, &counts)
	end(err)
	d.Metrics.OwnershipApplied(p.strategy, time.Since(begin), r.Looked, r.Changed)
	if err != nil {
		return fmt.Errorf("volume %s: giving its files to group %d: %w (%s)", p.id, gid, err, counted())
	}
	if err := d.recorded(p, root); err != nil {
		return err
	}
	if n := counts.Refused.Load(); n > 0 {
		d.Log.Warn("files that nobody may change (chattr +i or +a, or in a read-only subvolume) keep their group",
			"volume_id", p.id, "group", gid, "files", n, "one_of_them", counts.Example())
	}
	d.Log.Info("a volume was given to a group", "volume_id", p.id, "group", gid, "looked_at", r.Looked, "changed", r.Changed, "took",
		time.Since(begin))
	return nil
}

// recorded checks whether a volume that was given to a group has a record of it. A full one may have no room. An id map needs the record:
// without it the next publish for another group would change the files that this one shows.
func (d *Driver) recorded(p *publication, root *os.File) error {
	_, known, err := ownership.State(root)
	if err != nil || known {
		return err
	}
	if p.strategy == strategyIdmap {
		return fault.New(fault.State, "volume %s has no room for the record of its group, which fsGroupStrategy=idmap needs: make room, in a "+
			"pod without fsGroup", p.id)
	}
	d.Log.Warn("a volume has no room for the record of its group, so each publish examines all its files", "volume_id", p.id)
	return nil
}

// finish applies recursiveReadOnly, and the id map with it, to a mount before it is attached.
func (d *Driver) finish(p *publication, m *mounter.Detached, idmap *mounter.IDMap) error {
	mode := p.attrs.RecursiveReadOnly
	asked := p.readOnly && mode != "Disabled"
	if p.readOnly {
		p.readOnlyAs = plain
	}
	if asked || idmap != nil {
		err := m.Change(mounter.View{Options: p.use.options, ReadOnly: p.readOnly, IDMap: idmap})
		switch {
		case err == nil:
			if asked {
				p.readOnlyAs = recursive
			}
		case idmap == nil && mode != "Enabled" && errors.Is(err, mounter.ErrNoMountSetattr):
			p.readOnlyAs = notRecursive
			d.Log.Warn("the publish is read-only, but not recursively: this kernel has no mount_setattr",
				"volume_id", p.id, "target_path", p.target)
		case errors.Is(err, mounter.ErrNoMountSetattr):
			return fault.New(fault.State,
				"volume %s: recursiveReadOnly=Enabled (or an id map) needs mount_setattr, Linux 5.12 or newer: %w", p.id, err)
		default:
			return fmt.Errorf("volume %s: %w", p.id, err)
		}
	}
	switch p.readOnlyAs {
	case recursive:
		d.Metrics.ReadOnlyPublish("recursive")
	case plain, notRecursive:
		d.Metrics.ReadOnlyPublish("plain")
	}
	return nil
}
