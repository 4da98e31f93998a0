package driver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// AuditLog records what is done to volumes, in a file that survives restarts and is rotated by size.
// A nil AuditLog records nothing.
type AuditLog struct {
	log *audit.Log
	dir string
}

// OpenAuditLog opens the log in a directory, which must exist.
func OpenAuditLog(dir string) (*AuditLog, error) {
	log, err := audit.Open(dir)
	if err != nil {
		return nil, err
	}
	return &AuditLog{log: log, dir: dir}, nil
}

// Close ends the log. A driver that still works logs an error for each event.
func (l *AuditLog) Close() error {
	if l == nil {
		return nil
	}
	return l.log.Close()
}

func (l *AuditLog) write(ctx context.Context, e audit.Event) error {
	if l == nil {
		return nil
	}
	return l.log.Write(ctx, e)
}

// events returns what the log still has.
func (l *AuditLog) events() ([]audit.Event, error) {
	if l == nil {
		return nil, nil
	}
	events, _, err := audit.Read(l.dir)
	return events, err
}

// audit writes an event with its outcome. A failed write is logged and stops nothing: a volume on a
// full disk must still be deleted.
func (d *Driver) audit(ctx context.Context, e audit.Event, err error) {
	switch {
	case err != nil:
		e.Outcome, e.Code = audit.Failed, fault.KindOf(err).String()
	case e.Outcome == "":
		e.Outcome = audit.Done
	}
	d.users.note(e)
	if werr := d.Audit.write(ctx, e); werr != nil {
		text := "the audit log lacks an event"
		if errors.Is(werr, audit.ErrNotRotated) {
			text = "the event is in the audit log, but the log cannot be rotated"
		}
		d.Log.ErrorContext(ctx, text, "action", e.Action, "volume_id", e.Volume,
			"snapshot_id", e.Snapshot, "error", werr)
	}
}

// irreversible writes a line before and after f: a crash within leaves one.
func (d *Driver) irreversible(ctx context.Context, e audit.Event, f func() error) error {
	begun := e
	begun.Outcome = audit.Begun
	d.audit(ctx, begun, nil)
	err := f()
	d.audit(ctx, e, err)
	return err
}

// createdEvent says what was created, and for which claim if the provisioner passes it (its flag
// --extra-create-metadata).
func createdEvent(v volume.Volume, parameters map[string]string) audit.Event {
	return audit.Event{
		Action: audit.Created, Volume: v.ID, Name: v.Name, Bytes: v.Size, FSType: v.FSType, Source: v.SourceSnapshot + v.SourceVolume,
		Claim: inventory.ClaimOf(parameters),
	}
}

// givenEvent says which pod got a volume, if the kubelet passes it (podInfoOnMount of the
// CSIDriver).
func givenEvent(action audit.Action, p *publication, context map[string]string) audit.Event {
	access := "mount"
	if p.use.block {
		access = "block"
	}
	if p.readOnly {
		access += ", read-only"
	}
	e := audit.Event{
		Action: action, Volume: p.id, Target: p.target, Access: access, Device: p.attachment.Device.Path, FSType: p.staged.FSType,
	}
	e.Pod, e.PodUID = podOf(context)
	return e
}

// podOf returns the volume's pod as NAMESPACE/NAME, and its uid; empty unless the kubelet passes
// them (podInfoOnMount of the CSIDriver).
func podOf(context map[string]string) (pod, uid string) {
	return join(context[orchestratorPrefix+"pod.namespace"], context[orchestratorPrefix+"pod.name"]), context[orchestratorPrefix+"pod.uid"]
}

func join(namespace, name string) string {
	if namespace == "" || name == "" {
		return name
	}
	return namespace + "/" + name
}

// auditStaged writes that a volume was staged.
func (d *Driver) auditStaged(ctx context.Context, id string, req *csi.NodeStageVolumeRequest) {
	if r, ok := d.staged.get(id); ok {
		d.audit(ctx, audit.Event{Action: audit.Staged, Volume: id, Device: r.Device.Path, FSType: r.FSType,
			Target: req.GetStagingTargetPath()}, nil)
	}
}
