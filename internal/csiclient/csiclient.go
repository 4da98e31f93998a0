// Package csiclient calls a CSI driver in the kubelet's order, for crustctl and for tests.
package csiclient

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-csi/crust-csi/internal/inventory"
)

// Client is a connection to a driver.
type Client struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
	inventory.InventoryClient
	conn       *grpc.ClientConn
	KubeletDir string
}

// Dial connects to unix:///path.
func Dial(endpoint, kubeletDir string, more ...grpc.DialOption) (*Client, error) {
	more = append(more, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	conn, err := grpc.NewClient(endpoint, more...)
	if err != nil {
		return nil, err
	}
	return &Client{
		csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn), inventory.NewInventoryClient(conn), conn,
		kubeletDir,
	}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Volumes returns all volumes that this node's driver reports.
func (c *Client) Volumes(ctx context.Context) ([]*inventory.Volume, error) {
	var all []*inventory.Volume
	for after := ""; ; {
		r, err := c.DescribeVolumes(ctx, &inventory.DescribeVolumesRequest{After: after})
		if err != nil {
			return nil, err
		}
		all = append(all, r.GetVolumes()...)
		if after = r.GetAfter(); after == "" {
			return all, nil
		}
	}
}

// Volume describes how a volume is used.
type Volume struct {
	ID         string
	FSType     string
	Block      bool
	MountFlags []string
	Mode       csi.VolumeCapability_AccessMode_Mode // zero: SINGLE_NODE_WRITER
	Context    map[string]string
	Group      string // the pod's fsGroup
}

// Capability returns the volume's CSI capability.
func (v Volume) Capability() *csi.VolumeCapability {
	mode := v.Mode
	if mode == csi.VolumeCapability_AccessMode_UNKNOWN {
		mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	}
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if v.Block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.FSType, MountFlags: v.MountFlags,
			VolumeMountGroup: v.Group}}
	}
	return c
}

// StagingPath returns the path where the kubelet stages a volume.
func (c *Client) StagingPath(id string) string {
	sum := sha256.Sum256([]byte(id))
	return filepath.Join(c.KubeletDir, "plugins/kubernetes.io/csi", hex.EncodeToString(sum[:]), "globalmount")
}

// Create makes a volume.
func (c *Client) Create(
	ctx context.Context, name string, size int64, v Volume, parameters map[string]string, source *csi.VolumeContentSource,
) (*csi.Volume, error) {
	r, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeContentSource: source,
		VolumeCapabilities: []*csi.VolumeCapability{v.Capability()}, Parameters: parameters,
	})
	return r.GetVolume(), err
}

// Stage makes the staging directory and stages the volume.
func (c *Client) Stage(ctx context.Context, v Volume) error {
	if _, err := os.Stat(c.KubeletDir); err != nil {
		return fmt.Errorf("--kubelet-dir: %w; give the one that csi-node was started with", err)
	}
	path := c.StagingPath(v.ID)
	if err := os.MkdirAll(path, 0o750); err != nil {
		return err
	}
	_, err := c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: path, VolumeCapability: v.Capability(), VolumeContext: v.Context,
	})
	return err
}

// Publish makes the target's parent directory and publishes a staged volume.
func (c *Client) Publish(ctx context.Context, v Volume, target string, readOnly bool) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	_, err := c.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: c.StagingPath(v.ID), TargetPath: target,
		VolumeCapability: v.Capability(), Readonly: readOnly, VolumeContext: v.Context,
	})
	return err
}

// Unpublish unpublishes a volume at a target.
func (c *Client) Unpublish(ctx context.Context, id, target string) error {
	_, err := c.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	return err
}

// Unstage unstages and removes the staging directory, as the kubelet does.
func (c *Client) Unstage(ctx context.Context, id string) error {
	path := c.StagingPath(id)
	if _, err := c.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: path}); err != nil {
		return err
	}
	for _, dir := range []string{path, filepath.Dir(path)} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("staging directory: %w", err)
		}
	}
	return nil
}

// Delete destroys a volume.
func (c *Client) Delete(ctx context.Context, id string) error {
	_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	return err
}

// Expand enlarges a volume and, if it is published, its file system.
func (c *Client) Expand(ctx context.Context, id string, size int64, path string) (int64, error) {
	r := &csi.CapacityRange{RequiredBytes: size}
	e, err := c.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: r})
	if err != nil || path == "" || !e.GetNodeExpansionRequired() {
		return e.GetCapacityBytes(), err
	}
	_, err = c.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: path, StagingTargetPath: c.StagingPath(id),
		CapacityRange: r})
	return e.GetCapacityBytes(), err
}
