package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// NodePublishVolume mounts a staged volume at a target path.
func (d *Driver) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	id := req.GetVolumeId()
	if err := required("volume_id", id, "target_path", req.GetTargetPath()); err != nil {
		return nil, err
	}
	switch {
	case req.GetVolumeCapability() == nil:
		return nil, invalid("volume_capability is missing")
	case req.GetStagingTargetPath() == "":
		return nil, fault.New(fault.State, "staging_target_path is missing: volumes of this driver are staged before they are published")
	}
	for _, path := range []string{req.GetTargetPath(), req.GetStagingTargetPath()} {
		if _, err := d.Root.Relative(path); err != nil {
			return nil, err
		}
	}
	attrs, err := parseAttributes(req.GetVolumeContext(), d.Volumes.Static())
	if err != nil {
		return nil, err
	}
	group, err := d.group(req.GetVolumeCapability(), attrs)
	if err != nil {
		return nil, err
	}
	supported, err := crust.SupportedFilesystems(req)
	if err != nil {
		return nil, invalid("%s", err)
	}
	resp := &csi.NodePublishVolumeResponse{}
	err = d.ops.long(ctx, "NodePublishVolume", func(ctx context.Context, progress *volume.Progress) error {
		p := publication{id: id, target: req.GetTargetPath(), staging: req.GetStagingTargetPath(), attrs: attrs, group: group,
			namespace: req.GetVolumeContext()[orchestratorPrefix+"pod.namespace"]}
		p.pod, p.podUID = podOf(req.GetVolumeContext())
		var err error
		if p.src, p.volume, err = d.Volumes.Find(id); err != nil {
			return err
		}
		if p.staged, p.attachment, err = d.requireStaged(p.src, id, p.staging); err != nil {
			return err
		}
		if p.use, err = parseUse(req.GetVolumeCapability(), p.attachment.Share != nil); err != nil {
			return err
		}
		if err := checkOptions(p.staged.FSType, p.use.options); err != nil {
			return fmt.Errorf("volume %s: %w", p.id, err)
		}
		p.readOnly = req.GetReadonly() || p.use.readOnly || p.use.options.ReadOnly()
		deferred, err := d.wouldDefer(&p, supported)
		if err != nil {
			return err
		}
		if deferred != nil {
			_, known := d.deferrals.at(id, p.target)
			if err := d.deferTo(&p, *deferred); err != nil {
				return err
			}
			if !known {
				d.audit(ctx, givenEvent(audit.Deferred, &p, req.GetVolumeContext()), nil)
			}
			return deferred.answer(resp)
		}
		if err := d.notDeferred(p.id); err != nil {
			return err
		}
		if !p.use.block {
			if err := withheld(p.volume, attrs.HostMayMount, "mounted"); err != nil {
				return err
			}
		}
		if p.strategy, err = d.strategy(&p); err != nil {
			return err
		}
		if err := p.groupOptions(); err != nil {
			return err
		}
		p.given = func() { d.audit(ctx, givenEvent(audit.Given, &p, req.GetVolumeContext()), nil) }
		return d.publish(ctx, &p, progress)
	}, id)
	if err != nil {
		return nil, d.notFinal(id, req.GetTargetPath(), err)
	}
	return resp, nil
}

// notFinal makes an error about a deferred target one that is not final. After a final error, a kubelet that does not know how its first
// call ended concludes that nothing is published (Kubernetes 1.36, isFinalError in csi_client.go). It then never unpublishes the target.
// What the CSI specification wants of an incompatible call, ALREADY_EXISTS, stays.
func (d *Driver) notFinal(id, target string, err error) error {
	if _, deferred := d.deferrals.at(id, target); !deferred {
		return err
	}
	switch fault.KindOf(err) {
	case fault.Busy, fault.Unavailable, fault.NoSpace, fault.Elsewhere, fault.Exists:
		return err
	}
	return fault.New(fault.Unavailable, "%w", err)
}

// publication is one publish: the request and what was found.
type publication struct {
	id, target, staging string
	namespace           string // of the pod, if the kubelet sends it
	src                 volume.Source
	volume              volume.Volume
	staged              stagedRecord
	attachment          volume.Attachment
	use                 use
	attrs               attributes
	group               *uint32 // the pod's fsGroup; nil: none
	strategy            string  // how it is applied
	readOnlyAs          readOnlyAs
	readOnly            bool
	alone               bool   // nobody else used the device when this began
	given               func() // writes the audit log
	pod, podUID         string // for whom: see podOf
}

func (p *publication) filesystem() mounter.Filesystem {
	return filesystem(p.attachment.Device, p.staged.FSType, p.use.options, p.readOnly)
}

func (d *Driver) mountable(p *publication) mounter.Filesystem {
	fs := p.filesystem()
	fs.Scratch, fs.NoPanic = d.scratchFor(p.id), !d.mountedHere(p.src, p.id)
	return fs
}

func (d *Driver) publish(ctx context.Context, p *publication, progress *volume.Progress) error {
	switch {
	case p.use.block != p.staged.Block:
		return fault.New(fault.State, "volume %s is staged as %s and cannot be published as %s", p.id,
			kindOf(p.staged.Block, p.staged.FSType), kindOf(p.use.block, p.use.fstype))
	case p.use.fstype != "" && fstype.Kernel(p.use.fstype) != fstype.Kernel(p.staged.FSType) && p.attachment.Share == nil:
		return fault.New(fault.State, "volume %s is staged with %s and cannot be published with %s", p.id, p.staged.FSType, p.use.fstype)
	case p.readOnly && p.use.options.ReadWrite():
		return invalid("volume %s: mount option \"rw\" contradicts a read-only publish", p.id)
	case !p.readOnly && p.attachment.Device.ReadOnly:
		return fault.New(fault.State, "volume %s: its device %s is read-only; publish it read-only", p.id, p.attachment.Device.Path)
	}
	if p.use.block {
		if err := p.src.RestoreDevices(ctx, p.id); err != nil {
			return err
		}
	}
	t, s, err := d.look(p.target)
	if err != nil {
		return err
	}
	defer t.Close()
	defer s.Close()
	if s.Occupant == mounter.MountPoint {
		err := d.republish(p, s)
		d.countConflict(p, err)
		return err
	}
	if p.use.mode == singleWriter || p.staged.Mode == singleWriter {
		if others := d.publishedAt(p.src, p.id); len(others) > 0 {
			return fault.New(fault.State,
				"volume %s has access mode SINGLE_NODE_SINGLE_WRITER (ReadWriteOncePod) and is published at %s already", p.id, others[0])
		}
	}
	if err := d.leftByRuntime(p); err != nil {
		return err
	}
	m, err := d.detached(ctx, p)
	d.countLabel(p, err)
	if err != nil {
		return err
	}
	defer m.Close()
	switch {
	case p.use.block:
		if p.readOnly {
			d.Metrics.ReadOnlyPublish("device")
		}
	default:
		var idmap *mounter.IDMap
		if p.attachment.Share != nil {
			// The NFS server decides ownership.
			d.Metrics.OwnershipSkipped("share")
		} else if idmap, err = d.applyGroup(ctx, p, m, progress); err != nil {
			return err
		}
		if err := d.finish(p, m, idmap); err != nil {
			return err
		}
	}
	what := shown{ReadOnly: p.readOnlyAs, Group: p.groupShown(), asked: p.askedGroup()}
	if err := d.published.note(p.id, p.target, what, p.attachment.Share != nil); err != nil {
		return errors.Join(err, d.releaseReadOnly(ctx, p))
	}
	err = failpoint.Err("publish.noted")
	if err == nil {
		err = m.Attach(t)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("volume %s: %w", p.id, err), d.published.remove(p.id, p.target), d.releaseReadOnly(ctx, p))
	}
	failpoint.Hit("publish.attached")
	p.given()
	return nil
}

// groupShown is the group that an id-mapped publish shows, as text; empty for
// any other.
func (p *publication) groupShown() string {
	if p.strategy != strategyIdmap || p.group == nil {
		return ""
	}
	return fmt.Sprint(*p.group)
}

func (p *publication) askedGroup() askedGroup {
	if p.group == nil {
		return askedGroup{known: true}
	}
	return askedGroup{known: true, group: fmt.Sprint(*p.group)}
}

// republish answers a repeated call: the mount must match the request.
func (d *Driver) republish(p *publication, s *mounter.State) error {
	ours, dev, err := d.shows(s, p.src, p.id, p.target)
	if err != nil {
		return err
	}
	if !ours {
		return fault.New(fault.State, "volume %s: something else is mounted at %s; it was left alone", p.id, p.target)
	}
	differs, conflict := "", false
	switch {
	case p.use.block:
		// A volume whose own device is read-only has only read-only publishes.
		if dev.Same(p.attachment.Device) == p.readOnly && !p.attachment.Device.ReadOnly {
			differs = "one is read-only, the other is not"
		}
	default:
		if differs, err = s.Differs(p.filesystem()); err != nil {
			return err
		}
		if differs == "" {
			if differs, err = otherLabel(p, s); err != nil {
				return fmt.Errorf("volume %s: the SELinux label at %s: %w", p.id, p.target, err)
			}
			conflict = differs != ""
		}
		// Each share mount has its own options.
		if differs == "" && p.attachment.Share == nil && !p.use.options.SameSuperblock(p.staged.Superblock) {
			differs = fmt.Sprintf("mounted with options %q, asked for with %q", p.staged.Superblock, p.use.options.SuperblockString())
		}
		have, want := d.published.shown(p.id, p.target), p.askedGroup()
		switch {
		case differs != "" || !d.AppliesGroups:
		case have.Group != "" && p.groupShown() != have.Group:
			differs = fmt.Sprintf("it shows its files as group %s's (fsGroupStrategy=idmap), and group %q was asked for with fsGroupStrategy=%s",
				have.Group, want.group, cmp.Or(p.strategy, strategyChown))
		case have.asked.known && have.asked != want:
			differs = fmt.Sprintf("group %q was asked for then, and group %q now", have.asked.group, want.group)
		}
	}
	if differs != "" {
		refusal := fault.New(fault.Exists, "volume %s is published at %s in another way: %s; unpublish it first", p.id, p.target, differs)
		if conflict {
			return labelConflict{refusal}
		}
		return refusal
	}
	d.published.add(p.id, p.target)
	if have := d.published.shown(p.id, p.target).ReadOnly; p.attrs.RecursiveReadOnly == "Enabled" && p.readOnly &&
		!p.use.block && have != recursive {
		what := map[readOnlyAs]string{plain: "it was asked for so", notRecursive: "this kernel had no mount_setattr (Linux 5.12)",
			writable: "nothing is on record of how it was published"}[have]
		return fault.New(fault.State,
			"volume %s is published at %s read-only, but not known to be recursively so (%s), and recursiveReadOnly=Enabled was asked for; unpublish it first",
			p.id, p.target, what)
	}
	return nil
}

// shareTimeout is how long a publish tries the addresses of a server. The one that it tries when the time is over is its last.
const shareTimeout = 2 * time.Minute

// detached prepares the mount for Attach.
func (d *Driver) detached(ctx context.Context, p *publication) (*mounter.Detached, error) {
	switch {
	case p.attachment.Share != nil:
		nctx, end := tracing.Begin(ctx, "mount", tracing.Volume(p.id))
		nctx, cancel := context.WithTimeout(nctx, shareTimeout) // nobody may be waiting any more
		defer cancel()
		m, err := mounter.OpenNFS(nctx, mounter.NFS{
			Source: p.attachment.Share.Source, Options: p.use.options, ReadOnly: p.readOnly, Network: d.HostNetwork,
		})
		end(err)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", p.id, err)
		}
		return m, nil
	case p.use.block:
		return d.rawDevice(ctx, p)
	}
	if err := d.agreeOnSuperblock(p); err != nil {
		return nil, err
	}
	if p.volume.Facts.GrowDue {
		fs, err := d.live(p.attachment.Device, p.id, p.staged.FSType)
		if err != nil {
			return nil, err
		}
		err = d.growth(ctx, p.src, p.id, fs)
		if errors.Is(err, mounter.ErrGrowRefused) || errors.Is(err, mounter.ErrGrowOffline) {
			// Its files are all there, as before. The growth stays due.
			d.Log.WarnContext(ctx, "a volume has not its new size yet", "volume_id", p.id, "error", err)
		} else if err != nil {
			return nil, err
		}
	}
	// Inode tables on a device are whole only if nobody else has it mounted. This cannot be seen
	// once it is mounted here.
	if p.walkable() && len(d.publishedAt(p.src, p.id)) == 0 {
		busy, err := d.busy(p.id, p.attachment.Device.Path)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", p.id, err)
		}
		p.alone = !busy
	}
	_, end := tracing.Begin(ctx, "mount", tracing.Volume(p.id))
	m, err := mounter.Open(d.mountable(p))
	end(err)
	if err != nil {
		return nil, d.stopped(p, fmt.Errorf("volume %s: %w", p.id, err))
	}
	return m, nil
}

// stopped explains why a volume cannot be mounted again: its file system is mounted and has stopped, because of errors. btrfs, for example,
// fails with EINVAL then.
func (d *Driver) stopped(p *publication, err error) error {
	for _, at := range d.publishedAt(p.src, p.id) {
		s, aerr := d.at(p.src, p.id, at)
		if aerr != nil {
			continue
		}
		for _, a := range s.Ailments(p.attachment.Device) {
			if a.Fatal {
				err = fault.New(fault.State, "%w. %s. Stop all pods that use the volume: it is checked when it is next staged", err, a.Message)
				break
			}
		}
		s.Close()
		break // the others show the same file system
	}
	return err
}

// agreeOnSuperblock refuses superblock options that differ from those of the live mounts: the
// kernel would share the superblock and silently ignore them. If nothing is mounted, it takes the
// new ones.
func (d *Driver) agreeOnSuperblock(p *publication) error {
	want := p.use.options.SuperblockString()
	if p.use.options.SameSuperblock(p.staged.Superblock) {
		return nil
	}
	busy, err := d.busy(p.id, p.attachment.Device.Path)
	if err != nil {
		return err
	}
	if busy {
		if have, err := mounter.ParseOptions([]string{p.staged.Superblock}); err == nil &&
			!mounter.SameLabel(have.Context(), p.use.options.Context()) {
			return d.conflictOfLabels(p, have.Context())
		}
		return fault.New(fault.State,
			"volume %s is mounted with the options %q and cannot be mounted with %q at the same time: all mounts of a volume share them. Unpublish it first, or ask for the same options%s",
			p.id, p.staged.Superblock, want, mounter.HeldBy(p.attachment.Device).After("; "))
	}
	p.staged.Superblock = want
	return d.staged.put(p.staged)
}
