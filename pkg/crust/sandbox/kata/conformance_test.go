package kata_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/conformance"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/kata"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
)

// C11: the server with this backend keeps the contract, as far as that is about volumes that no container has started with.
func TestC11_KataConforms(t *testing.T) {
	w := newWorld(t, kata.Go)
	w.server.Devices.Allow = []string{"/dev/loop*"}
	w.sandbox("one")
	w.sandbox("two")
	g := grpc.NewServer(append(crust.Limits(), grpc.ChainUnaryInterceptor(faultgrpc.UnaryInterceptor))...)
	w.server.RegisterServices(g)
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	check(t, err)
	go func() { _ = g.Serve(l) }() // until Stop
	t.Cleanup(g.Stop)
	conn, err := grpc.NewClient("unix:"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(t, err)
	t.Cleanup(func() { conn.Close() })
	results, err := conformance.Run(t.Context(), conformance.Config{Client: struct {
		crustv1alpha1.RuntimeAssistedStorageManagementClient
		crustv1alpha1.SandboxManagementClient
	}{crustv1alpha1.NewRuntimeAssistedStorageManagementClient(conn), crustv1alpha1.NewSandboxManagementClient(conn)},
		Sandbox: "one", Other: "two", KubeletDir: w.kubelet, Scratch: t.TempDir()})
	check(t, err)
	passed := 0
	for _, r := range results {
		t.Logf("%s: %s %s", r.Check, r.Outcome, r.Detail)
		switch r.Outcome {
		case conformance.Failed:
			t.Errorf("%s: %s", r.Check, r.Detail)
		case conformance.Passed:
			passed++
		}
	}
	if passed < len(results)-3 { // growth, that of a read-only volume, and slots, which Kata does not have
		t.Errorf("%d of %d passed", passed, len(results))
	}
	if left, err := os.ReadDir(w.volumes); len(left) > 0 || err != nil {
		t.Errorf("%v are left, %v", left, err)
	}
}
