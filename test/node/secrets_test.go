package node

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

const secret = "hunter2-do-not-tell"

// teller calls a driver, and puts secrets into every request that can hold some. It keeps all
// answers.
type teller struct {
	conn     *grpc.ClientConn
	answered strings.Builder
	asked    map[string]int // calls with secrets, by method
}

func secretsField(m protoreflect.MessageDescriptor) protoreflect.FieldDescriptor {
	if f := m.Fields().ByName("secrets"); f != nil && f.IsMap() {
		return f
	}
	return nil
}

func newTeller(t *testing.T, endpoint string) *teller {
	t.Helper()
	tell := &teller{asked: map[string]int{}}
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			m := req.(proto.Message).ProtoReflect()
			if f := secretsField(m.Descriptor()); f != nil {
				m.Mutable(f).Map().Set(protoreflect.ValueOfString("password").MapKey(), protoreflect.ValueOfString(secret))
				tell.asked[method]++
			}
			err := invoke(ctx, method, req, reply, cc, opts...)
			fmt.Fprintln(&tell.answered, method, reply, err)
			return err
		}))
	ok(t, err)
	t.Cleanup(func() { conn.Close() })
	tell.conn = conn
	return tell
}

// C10, D10: every CSI call that can hold a secret gets one: calls that succeed, calls that are
// refused for all kinds of reasons, and deferrals. Afterwards the secret is nowhere.
func TestC10_D10_SecretsAreNowhere(t *testing.T) {
	t.Parallel()
	n, metrics := withMetrics(t, "-v", "9")
	tell := newTeller(t, n.Endpoint())
	controller, node := csi.NewControllerClient(tell.conn), csi.NewNodeClient(tell.conn)
	ctx := ctxOf(t)
	for _, deferred := range []bool{false, true} {
		v := csiclient.Volume{FSType: "ext4"}
		if deferred {
			v.Context = deferrable
		}
		bytes := &csi.CapacityRange{RequiredBytes: size}
		made, err := controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: fmt.Sprint("a", deferred), CapacityRange: bytes,
			VolumeCapabilities: []*csi.VolumeCapability{v.Capability()}})
		ok(t, err)
		_, err = controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: fmt.Sprint("a", deferred),
			CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}, VolumeCapabilities: []*csi.VolumeCapability{v.Capability()}})
		wantError(t, err)
		_, err = controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "b", CapacityRange: bytes,
			VolumeCapabilities: []*csi.VolumeCapability{v.Capability()}, Parameters: map[string]string{"nonsense": "1"}})
		wantError(t, err)
		v.ID = made.GetVolume().GetVolumeId()
		_, err = controller.ValidateVolumeCapabilities(ctx,
			&csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.ID, VolumeCapabilities: []*csi.VolumeCapability{v.Capability()}})
		ok(t, err)
		staging, target := n.Client.StagingPath(v.ID), n.Target("a")
		ok(t, os.MkdirAll(staging, 0o750))
		ok(t, os.MkdirAll(filepath.Dir(target), 0o750))
		stage := &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: staging, VolumeCapability: v.Capability(),
			VolumeContext: v.Context}
		publish := &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: staging, TargetPath: target,
			VolumeCapability: v.Capability(), VolumeContext: v.Context}
		if deferred {
			ok(t, crust.SetSupportedFilesystems(publish, []string{"ext4"}))
		}
		_, err = node.NodePublishVolume(ctx, publish) // not staged
		wantError(t, err)
		_, err = node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: staging,
			VolumeCapability: csiclient.Volume{FSType: "nosuchfs"}.Capability()})
		wantError(t, err)
		_, err = node.NodeStageVolume(ctx, stage)
		ok(t, err)
		_, err = node.NodePublishVolume(ctx, publish)
		ok(t, err)
		other := proto.Clone(publish).(*csi.NodePublishVolumeRequest)
		other.TargetPath, other.VolumeCapability = n.Target("b"), csiclient.Volume{FSType: "xfs"}.Capability()
		_, err = node.NodePublishVolume(ctx, other)
		wantError(t, err)
		_, err = controller.ControllerExpandVolume(ctx,
			&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
		ok(t, err)
		_, err = controller.ControllerExpandVolume(ctx,
			&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 60}})
		wantError(t, err)
		expand := &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: target, StagingTargetPath: staging,
			CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 50}}
		if deferred {
			ok(t, crust.SetSupportsExpand(expand, true))
		}
		_, err = node.NodeExpandVolume(ctx, expand)
		wantError(t, err)
		_, err = controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID}) // in use
		wantError(t, err)
		if !deferred {
			snap, err := controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: v.ID, Name: "snap"})
			ok(t, err)
			_, err = controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshot().GetSnapshotId()})
			ok(t, err)
		}
		ok(t, n.Client.Unpublish(ctx, v.ID, target))
		ok(t, n.Client.Unstage(ctx, v.ID))
		_, err = controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
		ok(t, err)
	}
	// For all other methods that take secrets, at least one request without an id.
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			m := services.Get(i).Methods().Get(j)
			if secretsField(m.Input()) == nil || m.IsStreamingServer() {
				continue
			}
			name := fmt.Sprintf("/%s/%s", services.Get(i).FullName(), m.Name())
			_ = tell.conn.Invoke(ctx, name, dynamicpb.NewMessage(m.Input()), dynamicpb.NewMessage(m.Output())) // refused or not offered
			if tell.asked[name] == 0 {
				t.Errorf("%s was not asked", name)
			}
		}
	}
	if strings.Contains(tell.answered.String(), secret) {
		t.Errorf("the secret is in an answer:\n%s", tell.answered.String())
	}
	if strings.Contains(metrics(), secret) {
		t.Error("the secret is in the metrics")
	}
	for _, method := range []string{"CreateVolume", "DeleteVolume", "ControllerExpandVolume", "NodeStageVolume", "NodePublishVolume",
		"NodeExpandVolume", "CreateSnapshot"} {
		if !strings.Contains(n.Log(), method) {
			t.Errorf("the log holds no request of %s", method)
		}
	}
	if strings.Contains(n.Log(), secret) || !strings.Contains(n.Log(), "***stripped***") {
		t.Error("the secret is in the log, or the log does not hold the requests")
	}
	ok(t, filepath.WalkDir(n.Dir, func(path string, d fs.DirEntry, err error) error {
		ok(t, err)
		if d.Type().IsRegular() && strings.Contains(read(t, path), secret) {
			t.Errorf("the secret is in %s", path)
		}
		return nil
	}))
}

func wantError(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		t.Error("it was not refused")
	}
}
