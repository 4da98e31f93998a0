package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// Server serves a Manager as the two gRPC services.
type Server struct {
	crustv1alpha1.UnimplementedRuntimeAssistedStorageManagementServer
	crustv1alpha1.UnimplementedSandboxManagementServer
	*Manager
}

// RegisterServices registers both services. g needs the interceptors of package faultgrpc, for the codes of
// errors (an orchestrator repeats a call by its code), and the options of crust.Limits.
func (s *Server) RegisterServices(g grpc.ServiceRegistrar) {
	crustv1alpha1.RegisterRuntimeAssistedStorageManagementServer(g, s)
	crustv1alpha1.RegisterSandboxManagementServer(g, s)
}

// RuntimeGetCapabilities returns the backend's capabilities.
func (s *Server) RuntimeGetCapabilities(
	context.Context, *crustv1alpha1.RuntimeGetCapabilitiesRequest,
) (*crustv1alpha1.RuntimeGetCapabilitiesResponse, error) {
	resp := &crustv1alpha1.RuntimeGetCapabilitiesResponse{}
	for _, c := range s.Backend.Capabilities() {
		resp.Capabilities = append(resp.Capabilities, &crustv1alpha1.RuntimeCapability{
			Type: &crustv1alpha1.RuntimeCapability_Rpc{Rpc: &crustv1alpha1.RuntimeCapability_RPC{Type: c}},
		})
	}
	return resp, nil
}

// RuntimeGetSupportedFileSystems asks the backend's kernel.
func (s *Server) RuntimeGetSupportedFileSystems(
	ctx context.Context, _ *crustv1alpha1.RuntimeGetSupportedFileSystemsRequest,
) (*crustv1alpha1.RuntimeGetSupportedFileSystemsResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	list, err := s.Backend.FileSystems(ctx)
	resp := &crustv1alpha1.RuntimeGetSupportedFileSystemsResponse{FileSystems: list}
	for _, name := range list {
		if s.Backend.Grows(name) {
			resp.GrowingFileSystems = append(resp.GrowingFileSystems, name)
		}
	}
	return resp, err
}

func required(fields ...string) error {
	for i := 0; i < len(fields); i += 2 {
		if fields[i+1] == "" {
			return fault.New(fault.Invalid, "%s is missing", fields[i])
		}
	}
	return nil
}

// RuntimePublishVolume mounts a volume in a sandbox.
func (s *Server) RuntimePublishVolume(
	ctx context.Context, r *crustv1alpha1.RuntimePublishVolumeRequest,
) (*crustv1alpha1.RuntimePublishVolumeResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId(), "host_volume_id", r.GetHostVolumeId(), "host_target_path", r.GetHostTargetPath(),
		"file_system", r.GetFileSystem()); err != nil {
		return nil, err
	}
	// Each string is one option: SELinux labels have commas.
	o, err := mounter.ParseOptions(r.GetMountOptions())
	if err != nil {
		return nil, err
	}
	v := Volume{Target: r.GetHostTargetPath(), Type: r.GetFileSystem(), Options: o, ReadOnly: o.ReadOnly(), Group: r.FsgroupGid}
	switch policy := ownership.Policy(r.GetFsgroupPolicy()); policy {
	case "", ownership.OnRootMismatch:
		v.Policy = ownership.OnRootMismatch
	case ownership.Always:
		v.Policy = policy
	default:
		return nil, fault.New(fault.Invalid, "fsgroup_policy %q: Always or OnRootMismatch", policy)
	}
	if v.Group != nil && *v.Group == ^uint32(0) {
		return nil, fault.New(fault.Invalid, "fsgroup_gid %d is no group", *v.Group)
	}
	if v.Device, err = s.Devices.find(s.KubeletDir, r.GetHostVolumeId(), v.Target); err != nil {
		return nil, err
	}
	isPending, err := s.Publish(ctx, r.GetSandboxId(), v)
	return &crustv1alpha1.RuntimePublishVolumeResponse{Pending: isPending}, err
}

// RuntimeGetVolumeStats asks the sandbox's kernel.
func (s *Server) RuntimeGetVolumeStats(
	ctx context.Context, r *crustv1alpha1.RuntimeGetVolumeStatsRequest,
) (*crustv1alpha1.RuntimeGetVolumeStatsResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId(), "host_volume_id", r.GetHostVolumeId()); err != nil {
		return nil, err
	}
	u, ailment, err := s.Stats(ctx, r.GetSandboxId(), r.GetHostVolumeId())
	if err != nil {
		return nil, err
	}
	resp := &crustv1alpha1.RuntimeGetVolumeStatsResponse{
		Usage: []*crustv1alpha1.VolumeUsage{
			{Unit: crustv1alpha1.VolumeUsage_BYTES, Total: u.TotalBytes, Available: u.AvailableBytes, Used: u.UsedBytes},
		},
		VolumeCondition: &crustv1alpha1.VolumeCondition{Abnormal: ailment != "", Message: "the file system is well"},
	}
	if u.TotalInodes > 0 {
		resp.Usage = append(resp.Usage, &crustv1alpha1.VolumeUsage{Unit: crustv1alpha1.VolumeUsage_INODES, Total: u.TotalInodes,
			Available: u.AvailableInodes, Used: u.UsedInodes})
	}
	if ailment != "" {
		resp.VolumeCondition.Message = ailment
	}
	return resp, nil
}

// RuntimeExpandVolume grows a file system in its sandbox.
func (s *Server) RuntimeExpandVolume(
	ctx context.Context, r *crustv1alpha1.RuntimeExpandVolumeRequest,
) (*crustv1alpha1.RuntimeExpandVolumeResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId(), "host_volume_id", r.GetHostVolumeId()); err != nil {
		return nil, err
	}
	size, err := s.Expand(ctx, r.GetSandboxId(), r.GetHostVolumeId(), r.GetRequiredBytes())
	return &crustv1alpha1.RuntimeExpandVolumeResponse{CapacityBytes: size}, err
}

// RegisterSandbox adds a sandbox.
func (s *Server) RegisterSandbox(
	ctx context.Context, r *crustv1alpha1.RegisterSandboxRequest,
) (*crustv1alpha1.RegisterSandboxResponse, error) {
	if r.GetPid() < 0 {
		return nil, fault.New(fault.Invalid, "pid %d", r.GetPid())
	}
	switch kind := kindOf(r); {
	case kind == "" && len(r.ProtoReflect().GetUnknown()) > 0:
		return nil, fault.New(fault.Invalid, "a sandbox of a kind that this server does not know: it has the backend %q", s.Backend.Kind())
	case kind != "" && kind != s.Backend.Kind():
		return nil, fault.New(fault.Invalid, "a sandbox of kind %q: this server has the backend %q", kind, s.Backend.Kind())
	}
	reach := s.Backend.Registration(r)
	if reach == nil {
		return &crustv1alpha1.RegisterSandboxResponse{}, s.registered(r.GetSandboxId())
	}
	spec, err := NewSpec(r.GetSandboxId(), int(r.GetPid()), reach)
	if err != nil {
		return nil, err
	}
	return &crustv1alpha1.RegisterSandboxResponse{}, s.Register(ctx, spec)
}

// DeregisterSandbox removes a sandbox.
func (s *Server) DeregisterSandbox(
	ctx context.Context, r *crustv1alpha1.DeregisterSandboxRequest,
) (*crustv1alpha1.DeregisterSandboxResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId()); err != nil {
		return nil, err
	}
	return &crustv1alpha1.DeregisterSandboxResponse{}, s.Deregister(ctx, r.GetSandboxId())
}

// ListSandboxes lists all sandboxes.
func (s *Server) ListSandboxes(context.Context, *crustv1alpha1.ListSandboxesRequest) (*crustv1alpha1.ListSandboxesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	resp := &crustv1alpha1.ListSandboxesResponse{}
	for id, b := range s.sandboxes {
		sb := &crustv1alpha1.Sandbox{SandboxId: id, Kind: s.Backend.Kind(), Pid: int64(b.record.Process.PID),
			MountNamespace: b.sandbox().MountNamespace()}
		for source, r := range b.record.Volumes {
			sb.Volumes = append(sb.Volumes, &crustv1alpha1.Volume{
				HostVolumeId: source, HostTargetPath: r.Target, FileSystem: r.Type, ReadOnly: r.ReadOnly, State: r.State,
				SandboxDevice: r.Place.Device, SandboxPath: r.Place.Path,
			})
		}
		slices.SortFunc(sb.Volumes, func(a, b *crustv1alpha1.Volume) int {
			return strings.Compare(a.GetHostVolumeId(), b.GetHostVolumeId())
		})
		resp.Sandboxes = append(resp.Sandboxes, sb)
	}
	slices.SortFunc(resp.Sandboxes, func(a, b *crustv1alpha1.Sandbox) int { return strings.Compare(a.GetSandboxId(), b.GetSandboxId()) })
	return resp, nil
}

// UnpublishVolume unmounts a volume in a sandbox.
func (s *Server) UnpublishVolume(
	ctx context.Context, r *crustv1alpha1.UnpublishVolumeRequest,
) (*crustv1alpha1.UnpublishVolumeResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId(), "host_volume_id", r.GetHostVolumeId()); err != nil {
		return nil, err
	}
	return &crustv1alpha1.UnpublishVolumeResponse{}, s.Unpublish(ctx, r.GetSandboxId(), r.GetHostVolumeId())
}

// ResolveMount returns the path that a container mounts.
func (s *Server) ResolveMount(ctx context.Context, r *crustv1alpha1.ResolveMountRequest) (*crustv1alpha1.ResolveMountResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId(), "source", r.GetSource()); err != nil {
		return nil, err
	}
	if slot, ok := crust.SlotOf(r.GetSource()); ok {
		path, err := s.PrepareSlot(ctx, r.GetSandboxId(), slot)
		return &crustv1alpha1.ResolveMountResponse{Path: path}, err
	}
	path, foreign, err := s.Resolve(ctx, r.GetSandboxId(), r.GetSource())
	return &crustv1alpha1.ResolveMountResponse{Path: path, Foreign: foreign}, err
}

// BindVolume shows a volume in a slot.
func (s *Server) BindVolume(ctx context.Context, r *crustv1alpha1.BindVolumeRequest) (*crustv1alpha1.BindVolumeResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId(), "slot", r.GetSlot(), "host_volume_id", r.GetHostVolumeId()); err != nil {
		return nil, err
	}
	return &crustv1alpha1.BindVolumeResponse{},
		s.Bind(ctx, r.GetSandboxId(), r.GetSlot(), r.GetHostVolumeId(), r.GetSubPath(), r.GetReadOnly())
}

// UnbindVolume empties a slot.
func (s *Server) UnbindVolume(ctx context.Context, r *crustv1alpha1.UnbindVolumeRequest) (*crustv1alpha1.UnbindVolumeResponse, error) {
	if err := required("sandbox_id", r.GetSandboxId(), "slot", r.GetSlot()); err != nil {
		return nil, err
	}
	return &crustv1alpha1.UnbindVolumeResponse{}, s.Unbind(ctx, r.GetSandboxId(), r.GetSlot())
}

// ExecInSandbox runs a program in a guest.
func (s *Server) ExecInSandbox(ctx context.Context, r *crustv1alpha1.ExecInSandboxRequest) (*crustv1alpha1.ExecInSandboxResponse, error) {
	b, err := s.find(r.GetSandboxId())
	if err != nil {
		return nil, err
	}
	e, ok := b.sandbox().(Execer)
	if !ok {
		way := ""
		if ns := b.sandbox().MountNamespace(); ns != "" {
			way = fmt.Sprintf("; look inside with `nsenter --mount=%s PROGRAM`", ns)
		}
		return nil, fault.New(fault.State, "this server runs no programs in a sandbox of kind %q, as %s is%s", s.Backend.Kind(),
			r.GetSandboxId(), way)
	}
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	out, code, err := e.Exec(ctx, r.GetArgv(), r.GetStdin())
	return &crustv1alpha1.ExecInSandboxResponse{Output: out, ExitCode: int32(code)}, err
}

// events go to every watcher.
type events struct {
	mu sync.Mutex
	m  map[chan *crustv1alpha1.WatchResponse]bool
}

// backlog is how many events a watcher may fall behind before its stream ends.
const backlog = 256

func (e *events) add() chan *crustv1alpha1.WatchResponse {
	c := make(chan *crustv1alpha1.WatchResponse, backlog)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m == nil {
		e.m = map[chan *crustv1alpha1.WatchResponse]bool{}
	}
	e.m[c] = true
	return c
}

func (e *events) remove(c chan *crustv1alpha1.WatchResponse) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.m[c] {
		delete(e.m, c)
		close(c)
	}
}

func (e *events) tell(r *crustv1alpha1.WatchResponse) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for c := range e.m {
		select {
		case c <- r:
		default: // it does not read: end its stream, so that it lists anew
			delete(e.m, c)
			close(c)
		}
	}
}

// Watch streams events.
func (s *Server) Watch(_ *crustv1alpha1.WatchRequest, stream grpc.ServerStreamingServer[crustv1alpha1.WatchResponse]) error {
	c := s.watchers.add()
	defer s.watchers.remove(c)
	// After the headers the caller misses no event.
	if err := stream.SendHeader(nil); err != nil {
		return err
	}
	for {
		select {
		case r, ok := <-c:
			if !ok {
				return status.Error(codes.ResourceExhausted, "this watcher fell behind; list the sandboxes and watch again")
			}
			if err := stream.Send(r); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}
