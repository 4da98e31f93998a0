package podvm

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// restarted is a crustd that was restarted, and reaches the microVM at the third call.
type restarted struct {
	crustv1alpha1.UnimplementedSandboxManagementServer
	calls int
}

func (s *restarted) DeregisterSandbox(context.Context, *crustv1alpha1.DeregisterSandboxRequest) (
	*crustv1alpha1.DeregisterSandboxResponse, error) {
	if s.calls++; s.calls < 3 {
		return nil, status.Error(codes.FailedPrecondition, "the sandbox cannot be reached: it is tried again")
	}
	return &crustv1alpha1.DeregisterSandboxResponse{}, nil
}

// C24: the end of a pod waits for a crustd that was restarted: otherwise the volumes are not unmounted in the guest.
func TestC24_ThePodsEndWaitsForACrustdThatReconnects(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server, crustd := grpc.NewServer(), &restarted{}
	crustv1alpha1.RegisterSandboxManagementServer(server, crustd)
	go func() { _ = server.Serve(l) }() // until it is stopped
	defer server.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m := &monitor{pod: &Pod{ID: "a", Server: "unix://" + socket}}
	if err := m.unmount(ctx); err != nil {
		t.Errorf("after %d calls: %v", crustd.calls, err)
	}
}
