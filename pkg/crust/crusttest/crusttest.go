// Package crusttest has a CRUST server in memory, for tests of orchestrators. It mounts nothing,
// records its calls, and fails as a test scripts it. [TestBackend] is the test suite that every
// backend of package sandbox passes.
package crusttest

import (
	"context"
	"net"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Server is a runtime that keeps its sandboxes and volumes in memory. Set its fields before the first call.
type Server struct {
	crustv1alpha1.UnimplementedRuntimeAssistedStorageManagementServer
	crustv1alpha1.UnimplementedSandboxManagementServer

	// Capabilities, FileSystems and Growing (those that it grows; empty: see VOLUME_RESIZE) are its
	// answers.
	Capabilities []crust.Capability
	FileSystems  []string
	Growing      []string
	// Pending is the answer of RuntimePublishVolume.
	Pending bool
	// Fail runs before each call, with the call's name and request. Its error becomes the answer.
	// It may block.
	Fail func(ctx context.Context, call string, request proto.Message) error

	mu        sync.Mutex
	calls     []string
	volumes   map[[2]string]*crustv1alpha1.RuntimePublishVolumeRequest
	capacity  map[string]int64
	sandboxes map[string]*crustv1alpha1.Sandbox
}

// New returns a server with every capability on each file system that can be made.
func New() *Server {
	return &Server{
		Capabilities: []crust.Capability{
			crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS,
			crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH,
			crustv1alpha1.RuntimeCapability_RPC_SUBPATH, crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL,
			crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT,
			crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS, crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE,
		},
		FileSystems: fstype.Formats(),
	}
}

// Client serves the server in memory until stop is called, and returns a client.
func (s *Server) Client() (client crustv1alpha1.RuntimeAssistedStorageManagementClient, stop func(), err error) {
	const buffer = 64 << 10
	l := bufconn.Listen(buffer)
	g := grpc.NewServer(crust.Limits()...)
	s.RegisterServices(g)
	go func() { _ = g.Serve(l) }() // ends with g.Stop
	conn, err := grpc.NewClient("passthrough:///crusttest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		g.Stop()
		return nil, nil, err
	}
	return crustv1alpha1.NewRuntimeAssistedStorageManagementClient(conn), func() { conn.Close(); g.Stop() }, nil
}

// Calls lists the names of the calls in order, failed ones included.
func (s *Server) Calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Published returns a volume's publish request in a sandbox; nil for none.
func (s *Server) Published(sandbox, volume string) *crustv1alpha1.RuntimePublishVolumeRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.volumes[[2]string{sandbox, volume}]
}

func (s *Server) begin(ctx context.Context, call string, r proto.Message) error {
	s.mu.Lock()
	s.calls = append(s.calls, call)
	s.mu.Unlock()
	if s.Fail != nil {
		return s.Fail(ctx, call, r)
	}
	return nil
}

// RuntimeGetCapabilities returns Capabilities.
func (s *Server) RuntimeGetCapabilities(
	ctx context.Context, r *crustv1alpha1.RuntimeGetCapabilitiesRequest,
) (*crustv1alpha1.RuntimeGetCapabilitiesResponse, error) {
	if err := s.begin(ctx, "RuntimeGetCapabilities", r); err != nil {
		return nil, err
	}
	resp := &crustv1alpha1.RuntimeGetCapabilitiesResponse{}
	for _, c := range s.Capabilities {
		resp.Capabilities = append(resp.Capabilities, &crustv1alpha1.RuntimeCapability{
			Type: &crustv1alpha1.RuntimeCapability_Rpc{Rpc: &crustv1alpha1.RuntimeCapability_RPC{Type: c}},
		})
	}
	return resp, nil
}

// RuntimeGetSupportedFileSystems returns FileSystems.
func (s *Server) RuntimeGetSupportedFileSystems(
	ctx context.Context, r *crustv1alpha1.RuntimeGetSupportedFileSystemsRequest,
) (*crustv1alpha1.RuntimeGetSupportedFileSystemsResponse, error) {
	if err := s.begin(ctx, "RuntimeGetSupportedFileSystems", r); err != nil {
		return nil, err
	}
	return &crustv1alpha1.RuntimeGetSupportedFileSystemsResponse{FileSystems: s.FileSystems, GrowingFileSystems: s.Growing}, nil
}

func reads(r *crustv1alpha1.RuntimePublishVolumeRequest) bool {
	return slices.Contains(r.GetMountOptions(), "ro")
}

// RuntimePublishVolume records the volume; a device is in one sandbox only, unless all of them only read it.
func (s *Server) RuntimePublishVolume(
	ctx context.Context, r *crustv1alpha1.RuntimePublishVolumeRequest,
) (*crustv1alpha1.RuntimePublishVolumeResponse, error) {
	if err := s.begin(ctx, "RuntimePublishVolume", r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := [2]string{r.GetSandboxId(), r.GetHostVolumeId()}
	for k, have := range s.volumes {
		switch {
		case k == key && !proto.Equal(have, r):
			return nil, status.Errorf(codes.AlreadyExists, "volume %s is published in sandbox %s in another way", key[1], key[0])
		case k[1] == key[1] && k != key && (!reads(have) || !reads(r)):
			return nil, status.Errorf(codes.FailedPrecondition, "volume %s is published in sandbox %s", k[1], k[0])
		}
	}
	if s.volumes == nil {
		s.volumes = map[[2]string]*crustv1alpha1.RuntimePublishVolumeRequest{}
	}
	s.volumes[key] = proto.CloneOf(r)
	return &crustv1alpha1.RuntimePublishVolumeResponse{Pending: s.Pending}, nil
}

func (s *Server) find(sandbox, volume string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.volumes[[2]string{sandbox, volume}]; !ok {
		return status.Errorf(codes.NotFound, "volume %s is not published in sandbox %s", volume, sandbox)
	}
	return nil
}

// RuntimeGetVolumeStats reports a volume that is half full.
func (s *Server) RuntimeGetVolumeStats(
	ctx context.Context, r *crustv1alpha1.RuntimeGetVolumeStatsRequest,
) (*crustv1alpha1.RuntimeGetVolumeStatsResponse, error) {
	if err := s.begin(ctx, "RuntimeGetVolumeStats", r); err != nil {
		return nil, err
	}
	if err := s.find(r.GetSandboxId(), r.GetHostVolumeId()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	total := max(s.capacity[r.GetHostVolumeId()], 1<<30)
	s.mu.Unlock()
	return &crustv1alpha1.RuntimeGetVolumeStatsResponse{
		Usage: []*crustv1alpha1.VolumeUsage{{Unit: crustv1alpha1.VolumeUsage_BYTES, Total: total, Used: total / 2,
			Available: total - total/2}},
		VolumeCondition: &crustv1alpha1.VolumeCondition{},
	}, nil
}

// RuntimeExpandVolume records the size.
func (s *Server) RuntimeExpandVolume(
	ctx context.Context, r *crustv1alpha1.RuntimeExpandVolumeRequest,
) (*crustv1alpha1.RuntimeExpandVolumeResponse, error) {
	if err := s.begin(ctx, "RuntimeExpandVolume", r); err != nil {
		return nil, err
	}
	if err := s.find(r.GetSandboxId(), r.GetHostVolumeId()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.capacity == nil {
		s.capacity = map[string]int64{}
	}
	s.capacity[r.GetHostVolumeId()] = r.GetRequiredBytes()
	return &crustv1alpha1.RuntimeExpandVolumeResponse{CapacityBytes: r.GetRequiredBytes()}, nil
}
