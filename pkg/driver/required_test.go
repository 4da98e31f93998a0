package driver

import (
	"context"
	"log/slog"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Of the fields that a request lacks, the first is named, as csi.proto names it.
func TestTheMissingFieldIsNamed(t *testing.T) {
	registry, err := volume.NewRegistry(nil)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d := &Driver{Config: Config{Volumes: registry, Log: log}, ops: newOperations(log), readers: newReaders(log)}
	const id, path = "v", "/p"
	for _, c := range []struct {
		missing string
		call    func(ctx context.Context) error
	}{
		{"name", func(ctx context.Context) error { return fails(d.CreateVolume(ctx, &csi.CreateVolumeRequest{})) }},
		{"volume_id", func(ctx context.Context) error { return fails(d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{})) }},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{}))
		}},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{}))
		}},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{}))
		}},
		{"capacity_range", func(ctx context.Context) error {
			return fails(d.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id}))
		}},
		{"source_volume_id", func(ctx context.Context) error { return fails(d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{})) }},
		{"name", func(ctx context.Context) error {
			return fails(d.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: id}))
		}},
		{"snapshot_id", func(ctx context.Context) error { return fails(d.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{})) }},
		{"snapshot_id", func(ctx context.Context) error { return fails(d.GetSnapshot(ctx, &csi.GetSnapshotRequest{})) }},
		{"volume_id", func(ctx context.Context) error { return fails(d.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{})) }},
		{"staging_target_path", func(ctx context.Context) error {
			return fails(d.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id}))
		}},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{}))
		}},
		{"staging_target_path", func(ctx context.Context) error {
			return fails(d.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id}))
		}},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{}))
		}},
		{"target_path", func(ctx context.Context) error {
			return fails(d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id}))
		}},
		{"volume_capability", func(ctx context.Context) error {
			return fails(d.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, TargetPath: path}))
		}},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{}))
		}},
		{"target_path", func(ctx context.Context) error {
			return fails(d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id}))
		}},
		{"volume_id", func(ctx context.Context) error { return fails(d.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{})) }},
		{"volume_path", func(ctx context.Context) error {
			return fails(d.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id}))
		}},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{}))
		}},
		{"volume_path", func(ctx context.Context) error {
			return fails(d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id}))
		}},
		{"volume_id", func(ctx context.Context) error {
			return fails(d.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{}))
		}},
	} {
		if err := c.call(t.Context()); !fault.Is(err, fault.Invalid) || err.Error() != c.missing+" is missing" {
			t.Errorf("without %s: %v", c.missing, err)
		}
	}
}

func fails[T any](_ T, err error) error { return err }
