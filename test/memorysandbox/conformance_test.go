package memorysandbox

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/conformance"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

type client struct {
	crustv1alpha1.RuntimeAssistedStorageManagementClient
	crustv1alpha1.SandboxManagementClient
}

// breaks changes what a server answers. It gets the name of the call without its service.
type breaks func(call string, req, resp any, err error) (any, error)

// conform runs the checks against a server in memory, whose answers go through breaks.
func conform(t *testing.T, late bool, b breaks) []conformance.Result {
	t.Helper()
	results, err := conforms(t, late, b, "one")
	check(t, err)
	return results
}

func conforms(t *testing.T, late bool, b breaks, id string) ([]conformance.Result, error) {
	t.Helper()
	m := newMemory()
	m.late = late
	kubelet := filepath.Join(t.TempDir(), "kubelet")
	check(t, os.Mkdir(kubelet, 0o750))
	manager, err := sandbox.New(t.Context(), sandbox.Config{StateDir: t.TempDir(), KubeletDir: kubelet, Backend: m, Timeout: time.Minute,
		OwnershipTimeout: time.Minute, Devices: sandbox.Devices{Allow: []string{"example.com=/dev/loop*"}}})
	check(t, err)
	s := &sandbox.Server{Manager: manager}
	defer s.Stop()
	g := grpc.NewServer(append(crust.Limits(), grpc.ChainUnaryInterceptor(
		func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			resp, err := next(ctx, req)
			return b(info.FullMethod[strings.LastIndex(info.FullMethod, "/")+1:], req, resp, err)
		}, faultgrpc.UnaryInterceptor))...)
	s.RegisterServices(g)
	c := serve(t, g)
	defer g.Stop()
	for _, id := range []string{"one", "two"} {
		_, err := c.RegisterSandbox(t.Context(), &crustv1alpha1.RegisterSandboxRequest{SandboxId: id})
		check(t, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	results, rerr := conformance.Run(ctx, conformance.Config{Client: c, Sandbox: id, Other: "two", KubeletDir: kubelet,
		Driver: "example.com", Scratch: t.TempDir()})
	left, err := filepath.Glob(kubelet + "/pods/*")
	if err != nil || len(left) > 0 {
		t.Errorf("%v are left, %v", left, err)
	}
	return results, rerr
}

func serve(t *testing.T, g *grpc.Server) client {
	t.Helper()
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	check(t, err)
	go func() { _ = g.Serve(listener) }() // until Stop
	conn, err := grpc.NewClient("unix:"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(t, err)
	t.Cleanup(func() { conn.Close() })
	return client{crustv1alpha1.NewRuntimeAssistedStorageManagementClient(conn), crustv1alpha1.NewSandboxManagementClient(conn)}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func asIs(_ string, _, resp any, err error) (any, error) { return resp, err }

// C11: a server that keeps the contract passes every check.
func TestC11_AServerConforms(t *testing.T) {
	for _, r := range conform(t, false, asIs) {
		if r.Outcome != conformance.Passed {
			t.Errorf("%s: %s %s", r.Check, r.Outcome, r.Detail)
		}
	}
	not := 0
	for _, r := range conform(t, true, asIs) {
		switch r.Outcome {
		case conformance.NotChecked:
			not++
		case conformance.Failed:
			t.Errorf("a server that mounts late: %s: %s", r.Check, r.Detail)
		}
	}
	if not != 1 { // the growth of one that is read-only
		t.Errorf("a server that mounts late: %d not checked", not)
	}
}

// C11: a server may have only the service of KEP-2857, and an unknown sandbox is reported before anything is made.
func TestC11_WhatIsNotThereIsNotChecked(t *testing.T) {
	not := 0
	for _, r := range conform(t, false, func(call string, _, resp any, err error) (any, error) {
		if !strings.HasPrefix(call, "Runtime") && call != "RegisterSandbox" { // the server has done it, so that nothing is left here
			return nil, status.Error(codes.Unimplemented, "unknown service")
		}
		return resp, err
	}) {
		switch r.Outcome {
		case conformance.NotChecked:
			not++
		case conformance.Failed:
			t.Errorf("%s: %s", r.Check, r.Detail)
		}
	}
	if not != 4 { // ResolveMount, BindVolume, ListSandboxes, UnpublishVolume
		t.Errorf("%d not checked", not)
	}
	for _, id := range []string{"", "none"} {
		if results, err := conforms(t, false, asIs, id); err == nil || len(results) > 0 {
			t.Errorf("sandbox %q: %v %v", id, results, err)
		}
	}
}

// careless mounts nothing.
type careless struct {
	crustv1alpha1.UnimplementedRuntimeAssistedStorageManagementServer
}

func (careless) RuntimeGetCapabilities(
	context.Context, *crustv1alpha1.RuntimeGetCapabilitiesRequest,
) (*crustv1alpha1.RuntimeGetCapabilitiesResponse, error) {
	return &crustv1alpha1.RuntimeGetCapabilitiesResponse{}, nil
}

func (careless) RuntimeGetSupportedFileSystems(
	context.Context, *crustv1alpha1.RuntimeGetSupportedFileSystemsRequest,
) (*crustv1alpha1.RuntimeGetSupportedFileSystemsResponse, error) {
	return &crustv1alpha1.RuntimeGetSupportedFileSystemsResponse{FileSystems: fstype.Formats()}, nil
}

func (careless) RuntimePublishVolume(
	context.Context, *crustv1alpha1.RuntimePublishVolumeRequest,
) (*crustv1alpha1.RuntimePublishVolumeResponse, error) {
	return &crustv1alpha1.RuntimePublishVolumeResponse{}, nil
}

// C11: a server that holds no device lets others have it.
func TestC11_ADeviceThatNobodyHolds(t *testing.T) {
	g := grpc.NewServer()
	crustv1alpha1.RegisterRuntimeAssistedStorageManagementServer(g, careless{})
	c := serve(t, g)
	defer g.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	results, err := conformance.Run(ctx, conformance.Config{Client: c, Sandbox: "one", KubeletDir: t.TempDir(), Scratch: t.TempDir()})
	check(t, err)
	if r := results[7]; r.Outcome != conformance.Failed || !strings.Contains(r.Detail, "must be held") {
		t.Errorf("%+v", r)
	}
}

// C11: a server that breaks the contract in one way fails in the check of that.
func TestC11_EachCheckCanFail(t *testing.T) {
	refuse := func(c codes.Code) error { return status.Error(c, "as the test wants") }
	published := map[string]bool{} // by target
	is := func(err error, c codes.Code) bool { return status.Code(err) == c }
	for want, b := range map[string]breaks{
		"capabilities are known": func(_ string, _, resp any, err error) (any, error) {
			if r, ok := resp.(*crustv1alpha1.RuntimeGetCapabilitiesResponse); ok {
				r.Capabilities = append(r.Capabilities, r.GetCapabilities()[0])
			}
			return resp, err
		},
		"file systems have names": func(_ string, _, resp any, err error) (any, error) {
			if r, ok := resp.(*crustv1alpha1.RuntimeGetSupportedFileSystemsResponse); ok {
				r.GrowingFileSystems = append(r.GetGrowingFileSystems(), "nofs")
			}
			return resp, err
		},
		"arguments": func(_ string, req, resp any, err error) (any, error) {
			if r, ok := req.(*crustv1alpha1.RuntimePublishVolumeRequest); ok && r.GetFsgroupPolicy() == "Sometimes" {
				return &crustv1alpha1.RuntimePublishVolumeResponse{}, nil
			}
			return resp, err
		},
		"an unknown sandbox": func(_ string, _, resp any, err error) (any, error) {
			if is(err, codes.NotFound) && strings.Contains(err.Error(), "is not registered") {
				return nil, refuse(codes.Unknown)
			}
			return resp, err
		},
		"an unknown file system": func(_ string, req, resp any, err error) (any, error) {
			if r, ok := req.(*crustv1alpha1.RuntimePublishVolumeRequest); ok && r.GetFileSystem() == "nofs" {
				return nil, refuse(codes.Internal)
			}
			return resp, err
		},
		"a blank device": func(_ string, _, resp any, err error) (any, error) {
			if is(err, codes.FailedPrecondition) && strings.Contains(err.Error(), "is blank") {
				return &crustv1alpha1.RuntimePublishVolumeResponse{}, nil
			}
			return resp, err
		},
		"a device that somebody else uses": func(_ string, req, resp any, err error) (any, error) {
			r, ok := req.(*crustv1alpha1.RuntimePublishVolumeRequest)
			if ok && err == nil && slices.Contains(r.GetMountOptions(), "noatime") {
				return nil, refuse(codes.AlreadyExists)
			}
			return resp, err
		},
		"a published volume holds": func(_ string, req, resp any, err error) (any, error) {
			if r, ok := req.(*crustv1alpha1.RuntimePublishVolumeRequest); ok && err == nil {
				if published[r.GetHostTargetPath()] {
					return nil, refuse(codes.AlreadyExists)
				}
				published[r.GetHostTargetPath()] = true
			}
			return resp, err
		},
		"a published device at another target": func(call string, _, resp any, err error) (any, error) {
			if call == "RuntimePublishVolume" && is(err, codes.AlreadyExists) {
				return &crustv1alpha1.RuntimePublishVolumeResponse{}, nil
			}
			return resp, err
		},
		"a published device in another sandbox": func(_ string, req, resp any, err error) (any, error) {
			if r, ok := req.(*crustv1alpha1.RuntimePublishVolumeRequest); ok && r.GetSandboxId() == "two" {
				return &crustv1alpha1.RuntimePublishVolumeResponse{}, nil
			}
			return resp, err
		},
		"statistics": func(_ string, _, resp any, err error) (any, error) {
			if r, ok := resp.(*crustv1alpha1.RuntimeGetVolumeStatsResponse); ok && err == nil && r.GetUsage()[0].GetTotal() < 400<<20 {
				r.Usage[0].Used = r.GetUsage()[0].GetTotal()
			}
			return resp, err
		},
		"a volume grows": func(_ string, _, resp any, err error) (any, error) {
			if is(err, codes.OutOfRange) {
				return &crustv1alpha1.RuntimeExpandVolumeResponse{}, nil
			}
			return resp, err
		},
		"a read-only volume": func(call string, _, resp any, err error) (any, error) {
			if call == "RuntimeExpandVolume" && is(err, codes.FailedPrecondition) {
				return &crustv1alpha1.RuntimeExpandVolumeResponse{}, nil
			}
			return resp, err
		},
		"a volume is published with a group": func(_ string, req, resp any, err error) (any, error) {
			if r, ok := req.(*crustv1alpha1.RuntimePublishVolumeRequest); ok && r.FsgroupGid != nil && err == nil {
				return nil, refuse(codes.Internal)
			}
			return resp, err
		},
		"mount sources resolve": func(_ string, _, resp any, err error) (any, error) {
			if r, ok := resp.(*crustv1alpha1.ResolveMountResponse); ok && r.GetForeign() {
				r.Path = "/somewhere"
			}
			return resp, err
		},
		"slots show a volume": func(call string, _, resp any, err error) (any, error) {
			if call == "BindVolume" && is(err, codes.AlreadyExists) {
				return &crustv1alpha1.BindVolumeResponse{}, nil
			}
			return resp, err
		},
		"volumes are listed": func(_ string, _, resp any, err error) (any, error) {
			if r, ok := resp.(*crustv1alpha1.ListSandboxesResponse); ok {
				for _, s := range r.GetSandboxes() {
					s.Volumes = nil
				}
			}
			return resp, err
		},
		"an unpublished volume": func(call string, _, resp any, err error) (any, error) {
			if call == "RuntimeGetVolumeStats" && is(err, codes.NotFound) && strings.Contains(err.Error(), "/dev/loop") &&
				!strings.Contains(err.Error(), "0000 ") {
				return nil, refuse(codes.Unavailable)
			}
			return resp, err
		},
	} {
		t.Run(want, func(t *testing.T) {
			results := conform(t, false, b)
			failed := slices.DeleteFunc(results, func(r conformance.Result) bool { return r.Outcome != conformance.Failed })
			if len(failed) != 1 || !strings.HasPrefix(failed[0].Check, want) {
				t.Errorf("failed: %v", failed)
			}
		})
	}
}
