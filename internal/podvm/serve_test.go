package podvm

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// anything is a monitor that does whatever it is asked for.
type anything struct {
	guestv1.UnimplementedPodServer
	made int
}

func (a *anything) CreateContainer(context.Context, *guestv1.CreateContainerRequest) (*guestv1.CreateContainerResponse, error) {
	a.made++
	return &guestv1.CreateContainerResponse{}, nil
}

func (*anything) Control(context.Context, *guestv1.ControlRequest) (*guestv1.ControlResponse, error) {
	return &guestv1.ControlResponse{}, nil
}

// Whoever takes over a stub, which carries what a tenant's process says, can make no container and name no device of the host.
func TestC24_WhatAStubMayAskFor(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s, a := grpc.NewServer(forStubs()...), &anything{}
	guestv1.RegisterPodServer(s, a)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	conn, err := dial("unix://" + socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := guestv1.NewPodClient(conn)
	r := &guestv1.CreateContainerRequest{BlockDevices: []*guestv1.BlockDevice{{Major: 8}}}
	if _, err := c.CreateContainer(t.Context(), r); status.Code(err) != codes.PermissionDenied || a.made != 0 {
		t.Errorf("CreateContainer: %v, %d", err, a.made)
	}
	if _, err := c.End(t.Context(), &guestv1.EndRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("End: %v", err)
	}
	if _, err := c.Control(t.Context(), &guestv1.ControlRequest{}); err != nil {
		t.Errorf("Control: %v", err)
	}
	ports, err := c.Ports(t.Context(), &guestv1.PortsRequest{})
	if err == nil {
		_, err = ports.Recv()
	}
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("Ports: %v", err)
	}
	run, err := c.Run(t.Context())
	if err == nil {
		_, err = run.Recv()
	}
	if status.Code(err) != codes.Unimplemented { // as anything answers
		t.Errorf("Run: %v", err)
	}
}

// A guest that has no answer in time is named as the reason, with the place where to look, whoever's clock was first.
func TestC24_AGuestThatDoesNotAnswerIsNamed(t *testing.T) {
	p := &Pod{ID: "p", dir: "/run/p"}
	for _, code := range []codes.Code{codes.DeadlineExceeded, codes.Canceled} {
		got := fmt.Sprint(p.said(status.Error(code, "CANCEL"), bootTime))
		if want := "the microVM of pod p: no answer within 1m40s: the machine is busy, or the guest hangs (CANCEL); " +
			"the guest's console is /run/p/console.log"; got != want {
			t.Errorf("%s:\n%s\nis not\n%s", code, got, want)
		}
	}
	if got := fmt.Sprint(p.said(status.Error(codes.FailedPrecondition, "no room"), bootTime)); got != "the microVM of pod p: no room" {
		t.Error(got)
	}
}
