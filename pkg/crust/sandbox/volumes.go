package sandbox

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

func key(id, source string) string { return "volume of " + id + " " + source }

// Publish mounts a volume in a sandbox. If the result is true, the sandbox has the volume and mounts it when its container starts.
func (m *Manager) Publish(ctx context.Context, id string, v Volume) (isPending bool, err error) {
	b, err := m.find(id)
	if err != nil {
		return false, err
	}
	if err := mounter.CheckOptions(v.Type, v.Options); err != nil {
		return false, err
	}
	below, err := filepath.Rel(m.KubeletDir, v.Target)
	if err != nil || !filepath.IsAbs(v.Target) || !filepath.IsLocal(below) || below == "." || filepath.Clean(v.Target) != v.Target {
		return false, fault.New(fault.Invalid, "host_target_path %q is no clean path below %s, where all targets lie", v.Target,
			m.KubeletDir)
	}
	source := v.Device.Path
	// The number too: a device may have two names.
	end, err := m.begin("RuntimePublishVolume", key(id, source), fmt.Sprintf("device %d:%d", v.Device.Major, v.Device.Minor))
	if err != nil {
		return false, err
	}
	defer end()
	if _, err := m.find(id); err != nil {
		return false, err // it was deregistered meanwhile
	}
	if away, ok := b.sandbox().(interface{ failed() error }); ok {
		return false, fmt.Errorf("volume %s in sandbox %s: %w", source, id, away.failed()) // before the device is claimed
	}
	if v.Readers, err = m.claim(id, v); err != nil {
		return false, err
	}
	limit := m.Timeout
	if v.Group != nil {
		limit = max(limit, m.OwnershipTimeout)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if !m.Backend.Mounts(v.Type) {
		return false, fault.New(fault.Invalid, "file_system %q cannot be mounted in a sandbox: its kernel does not have it", v.Type)
	}
	want := volumeRecord{
		State: publishing, Device: v.Device, Target: v.Target, Type: v.Type, Options: v.Options.List(),
		ReadOnly: v.ReadOnly, Group: v.Group,
		Policy: v.Policy,
	}
	m.mu.Lock()
	have, known := b.record.Volumes[source]
	m.mu.Unlock()
	if known {
		same := want
		same.State, same.Place = have.State, have.Place
		if !reflect.DeepEqual(have, same) {
			return false, fault.New(fault.Exists,
				"volume %s is published in sandbox %s in another way (%s at %s, options %v); unpublish it first", source, id, have.Type, have.Target, have.Options)
		}
	} else if err := m.keep(b, source, &want); err != nil {
		return false, err
	}
	var place Place
	if err = failpoint.Err("publish.recorded"); err == nil {
		place, err = b.sandbox().Publish(ctx, v)
	}
	if err != nil {
		err = fmt.Errorf("volume %s in sandbox %s: %w", source, id, err)
		if known && have.State != publishing {
			return false, err // it was mounted or handed over before, so it stays
		}
		if errors.As(err, new(untouched)) && !known {
			return false, errors.Join(err, m.keep(b, source, nil))
		}
		// Own timeout: the caller's time may be up.
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.Timeout)
		defer cancel()
		if uerr := b.sandbox().Unpublish(uctx, v); uerr != nil {
			return false, errors.Join(err, fmt.Errorf("and what was begun could not be undone: %w", uerr))
		}
		return false, errors.Join(err, m.keep(b, source, nil))
	}
	if err := failpoint.Err("publish.mounted"); err != nil {
		return false, err
	}
	want.State, want.Place = published, place
	if isPending = place.Pending; isPending {
		want.State, want.Place.Pending = pending, false
	}
	if known && reflect.DeepEqual(have, want) {
		return isPending, nil
	}
	if err := m.keep(b, source, &want); err != nil {
		return false, err
	}
	if isPending {
		return true, nil // watchers are told when it is mounted
	}
	m.watchers.tell(&crustv1alpha1.WatchResponse{Event: crustv1alpha1.WatchResponse_VOLUME_PUBLISHED, SandboxId: id, HostVolumeId: source})
	return isPending, nil
}

// Unpublish unmounts a volume in a sandbox.
func (m *Manager) Unpublish(ctx context.Context, id, source string) error {
	m.mu.Lock()
	b, ok := m.sandboxes[id]
	m.mu.Unlock()
	if !ok {
		return m.unusable(id)
	}
	end, err := m.begin("UnpublishVolume", key(id, source))
	if err != nil {
		return err
	}
	defer end()
	m.mu.Lock()
	r, ok := b.record.Volumes[source]
	closing := b.closing
	m.mu.Unlock()
	if !ok {
		return nil
	}
	if closing {
		return fault.New(fault.Busy, "sandbox %s: it is being deregistered; try again", id)
	}
	v, err := r.volume()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	if err := b.sandbox().Unpublish(ctx, v); err != nil {
		return fmt.Errorf("volume %s in sandbox %s: %w", source, id, err)
	}
	if err := failpoint.Err("unpublish.detached"); err != nil {
		return err
	}
	if err := m.keep(b, source, nil); err != nil {
		return err
	}
	m.watchers.tell(&crustv1alpha1.WatchResponse{Event: crustv1alpha1.WatchResponse_VOLUME_UNPUBLISHED,
		SandboxId: id, HostVolumeId: source})
	return nil
}

// Stats returns a volume's usage and ailment.
func (m *Manager) Stats(ctx context.Context, id, source string) (mounter.Usage, string, error) {
	b, v, r, err := m.volume(id, source)
	if err != nil {
		return mounter.Usage{}, "", err
	}
	leave, err := m.looks.enter(key(id, source), m.Timeout)
	if err != nil {
		return mounter.Usage{}, "", err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	u, ailment, err := b.sandbox().Stats(ctx, v)
	if err != nil {
		return u, ailment, fmt.Errorf("volume %s in sandbox %s: %w", source, id, err)
	}
	if r.State == pending {
		if err := m.mounted(b, id, source); err != nil { // the caller has its answer all the same
			m.Log.Warn("that a volume is mounted could not be noted", "sandbox_id", id, "volume", source, "error", err)
		}
	}
	return u, ailment, nil
}

// mounted notes that a volume is pending no longer. If another call for it is under way, a later one notes it.
func (m *Manager) mounted(b *registered, id, source string) error {
	end, err := m.begin("RuntimeGetVolumeStats", key(id, source))
	if err != nil {
		return nil
	}
	defer end()
	m.mu.Lock()
	r, ok := b.record.Volumes[source]
	m.mu.Unlock()
	if !ok || r.State != pending {
		return nil
	}
	r.State = published
	if err := m.keep(b, source, &r); err != nil {
		return err
	}
	m.watchers.tell(&crustv1alpha1.WatchResponse{Event: crustv1alpha1.WatchResponse_VOLUME_PUBLISHED, SandboxId: id, HostVolumeId: source})
	return nil
}

// Expand grows a volume's file system to its device. It returns the size in bytes.
func (m *Manager) Expand(ctx context.Context, id, source string, required int64) (int64, error) {
	if required < 0 {
		return 0, fault.New(fault.Invalid, "required_bytes %d is negative", required)
	}
	b, v, r, err := m.volume(id, source)
	if err != nil {
		return 0, err
	}
	end, err := m.begin("RuntimeExpandVolume", key(id, source))
	if err != nil {
		return 0, err
	}
	defer end()
	if r.ReadOnly {
		return 0, fault.New(fault.State, "volume %s is published read-only in sandbox %s, so it does not grow", source, id)
	}
	if now, err := mounter.FindDevice(v.Device.Path); err == nil && !now.Same(v.Device) {
		return 0, fault.New(fault.State, "volume %s: its path leads to the device %d:%d now, and sandbox %s has %d:%d; end the sandbox",
			source, now.Major, now.Minor, id, v.Device.Major, v.Device.Minor)
	}
	size, err := mounter.DeviceSize(v.Device)
	if err != nil {
		return 0, err
	}
	if size < required {
		return 0, fault.New(fault.OutOfRange,
			"volume %s: its device has %d bytes, %d were asked for; NodeExpandVolume of the CSI driver comes first", source, size, required)
	}
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	if err := b.sandbox().Expand(ctx, v, size); err != nil {
		return 0, fmt.Errorf("volume %s in sandbox %s: %w", source, id, err)
	}
	return size, nil
}

// Resolve returns the path that a container mounts for a mount source. foreign: the source is in no
// volume of the sandbox.
func (m *Manager) Resolve(ctx context.Context, id, source string) (path string, foreign bool, err error) {
	b, err := m.find(id)
	if err != nil {
		return "", false, err
	}
	clean := filepath.Clean(source)
	m.mu.Lock()
	var found volumeRecord
	sub := ""
	for _, r := range b.record.Volumes {
		if within(clean, r.Target) {
			found, sub = r, strings.TrimPrefix(strings.TrimPrefix(clean, r.Target), "/")
		}
	}
	m.mu.Unlock()
	if found.Target == "" {
		return "", true, nil
	}
	if found.State == publishing {
		return "", false, fault.New(fault.State, "volume %s is not mounted in sandbox %s yet", found.Device.Path, id)
	}
	if found.State == pending && sub != "" {
		return "", false, fault.New(fault.State, "%s of volume %s cannot be looked for in sandbox %s: it is mounted when a container starts",
			sub, found.Device.Path, id)
	}
	v, err := found.volume()
	if err != nil {
		return "", false, err
	}
	end, err := m.begin("ResolveMount", key(id, found.Device.Path))
	if err != nil {
		return "", false, err
	}
	defer end()
	if _, _, _, err := m.volume(id, found.Device.Path); err != nil {
		return "", false, err
	}
	ctx, cancel := context.WithTimeout(ctx, m.Timeout)
	defer cancel()
	path, err = b.sandbox().Resolve(ctx, v, sub)
	if err != nil {
		return "", false, fmt.Errorf("mount source %s in sandbox %s: %w", source, id, err)
	}
	return path, false, nil
}
