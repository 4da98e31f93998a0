package crusttest

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// RegisterServices registers s as both services. Of SandboxManagement it serves the calls about sandboxes, and UnpublishVolume. To imitate
// a runtime without SandboxManagement, register only the first.
func (s *Server) RegisterServices(g grpc.ServiceRegistrar) {
	crustv1alpha1.RegisterRuntimeAssistedStorageManagementServer(g, s)
	crustv1alpha1.RegisterSandboxManagementServer(g, s)
}

// RegisterSandbox records a sandbox, or accepts a repeat with the same process and kind. Without a kind, a new sandbox is a namespace, and
// a repeat matches any.
func (s *Server) RegisterSandbox(
	ctx context.Context, r *crustv1alpha1.RegisterSandboxRequest,
) (*crustv1alpha1.RegisterSandboxResponse, error) {
	if err := s.begin(ctx, "RegisterSandbox", r); err != nil {
		return nil, err
	}
	id := r.GetSandboxId()
	is := &crustv1alpha1.Sandbox{SandboxId: id, Kind: kindOf(r), Pid: r.GetPid()}
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.sandboxes[id]; have != nil {
		if have.GetPid() != is.GetPid() || r.GetKind() != nil && have.GetKind() != is.GetKind() {
			return nil, status.Errorf(codes.AlreadyExists, "sandbox %s is known as %s with process %d", id, have.GetKind(), have.GetPid())
		}
		return &crustv1alpha1.RegisterSandboxResponse{}, nil
	}
	if s.sandboxes == nil {
		s.sandboxes = map[string]*crustv1alpha1.Sandbox{}
	}
	s.sandboxes[id] = is
	return &crustv1alpha1.RegisterSandboxResponse{}, nil
}

func kindOf(r *crustv1alpha1.RegisterSandboxRequest) string {
	switch r.GetKind().(type) {
	case *crustv1alpha1.RegisterSandboxRequest_Qemu:
		return "qemu"
	case *crustv1alpha1.RegisterSandboxRequest_Kata:
		return "kata"
	default:
		return "namespace"
	}
}

// DeregisterSandbox forgets a sandbox and its volumes.
func (s *Server) DeregisterSandbox(
	ctx context.Context, r *crustv1alpha1.DeregisterSandboxRequest,
) (*crustv1alpha1.DeregisterSandboxResponse, error) {
	if err := s.begin(ctx, "DeregisterSandbox", r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sandboxes, r.GetSandboxId())
	for key := range s.volumes {
		if key[0] == r.GetSandboxId() {
			delete(s.volumes, key)
		}
	}
	return &crustv1alpha1.DeregisterSandboxResponse{}, nil
}

// ListSandboxes lists the registered sandboxes in the order of their ids, and their volumes in the order of theirs.
func (s *Server) ListSandboxes(
	ctx context.Context, r *crustv1alpha1.ListSandboxesRequest,
) (*crustv1alpha1.ListSandboxesResponse, error) {
	if err := s.begin(ctx, "ListSandboxes", r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	state := crust.StatePublished
	if s.Pending {
		state = crust.StatePending
	}
	resp := &crustv1alpha1.ListSandboxesResponse{}
	for _, id := range slices.Sorted(maps.Keys(s.sandboxes)) {
		is := proto.CloneOf(s.sandboxes[id])
		for key, v := range s.volumes {
			if key[0] == id {
				is.Volumes = append(is.Volumes, &crustv1alpha1.Volume{HostVolumeId: v.GetHostVolumeId(),
					HostTargetPath: v.GetHostTargetPath(), FileSystem: v.GetFileSystem(), State: state})
			}
		}
		slices.SortFunc(is.Volumes, func(a, b *crustv1alpha1.Volume) int { return cmp.Compare(a.GetHostVolumeId(), b.GetHostVolumeId()) })
		resp.Sandboxes = append(resp.Sandboxes, is)
	}
	return resp, nil
}

// UnpublishVolume forgets a volume.
func (s *Server) UnpublishVolume(
	ctx context.Context, r *crustv1alpha1.UnpublishVolumeRequest,
) (*crustv1alpha1.UnpublishVolumeResponse, error) {
	if err := s.begin(ctx, "UnpublishVolume", r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.volumes, [2]string{r.GetSandboxId(), r.GetHostVolumeId()})
	return &crustv1alpha1.UnpublishVolumeResponse{}, nil
}
