package sandbox_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/fault/faultgrpc"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// backend reaches the sandboxes of some runtime. crusttest.TestBackend checks a real one, and test/memorysandbox is one in 250 lines.
type backend struct{}

func (backend) Kind() string                                           { return "example" }
func (backend) Registration(*crustv1alpha1.RegisterSandboxRequest) any { return struct{}{} } // the id suffices
func (backend) Capabilities() []crust.Capability                       { return sandbox.BasicCapabilities(false) }
func (backend) FileSystems(context.Context) ([]string, error)          { return []string{"xfs"}, nil }
func (backend) Mounts(fstype string) bool                              { return fstype == "xfs" }
func (backend) Grows(string) bool                                      { return true }
func (backend) Process(context.Context, sandbox.Spec) (int, error)     { return 0, nil } // the runtime deregisters its sandboxes
func (backend) Forget(sandbox.Spec) error                              { return nil }
func (backend) Close() error                                           { return nil }

func (backend) Open(_ context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	fmt.Println("connected to", o.ID)
	return box{o.ID}, nil
}

// box is one sandbox.
type box struct{ id string }

// Publish would hold the device (O_EXCL), and have the sandbox's kernel mount it.
func (b box) Publish(context.Context, sandbox.Volume) (sandbox.Place, error) {
	return sandbox.Place{}, fault.New(fault.Unavailable, "sandbox %s is booting", b.id)
}
func (box) Unpublish(context.Context, sandbox.Volume) error { return nil }
func (box) Stats(context.Context, sandbox.Volume) (mounter.Usage, string, error) {
	return mounter.Usage{}, "", nil
}
func (box) Expand(context.Context, sandbox.Volume, int64) error             { return nil }
func (box) Resolve(context.Context, sandbox.Volume, string) (string, error) { return "", nil }
func (box) MountNamespace() string                                          { return "" }
func (box) Close() error                                                    { return nil }
func (b box) Detach()                                                       { fmt.Println("disconnected from", b.id) }

// A runtime's backend becomes a CRUST server: the Manager records who has what, and the backend mounts.
func Example() {
	dir, err := os.MkdirTemp("", "crust")
	check(err)
	defer os.RemoveAll(dir)
	ctx := context.Background()
	m, err := sandbox.New(ctx, sandbox.Config{StateDir: dir, KubeletDir: "/var/lib/kubelet", Backend: backend{}})
	check(err)
	l, err := net.Listen("unix", filepath.Join(dir, "crust.sock")) // crust.Listen admits root only
	check(err)
	g := grpc.NewServer(append(crust.Limits(), grpc.UnaryInterceptor(faultgrpc.UnaryInterceptor))...)
	(&sandbox.Server{Manager: m}).RegisterServices(g)
	go g.Serve(l)

	conn, err := grpc.NewClient("unix://"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err)
	defer conn.Close()
	c := crustv1alpha1.NewSandboxManagementClient(conn)
	_, err = c.RegisterSandbox(ctx, &crustv1alpha1.RegisterSandboxRequest{SandboxId: "pod-1"})
	check(err)
	r, err := crustv1alpha1.NewRuntimeAssistedStorageManagementClient(conn).RuntimeGetSupportedFileSystems(ctx,
		&crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	check(err)
	fmt.Println(r.GetFileSystems())

	// At the end of this process the sandboxes stay. The next one opens them again.
	g.Stop()
	m.Stop()
	// Output:
	// connected to pod-1
	// [xfs]
	// disconnected from pod-1
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
