package crust

import (
	"context"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust/crusttest"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A runtime fails with hostile text, which crustctl shows on a terminal.
func TestALow_TerminalsSeePlainWords(t *testing.T) {
	r := crusttest.New()
	r.Fail = func(context.Context, string, proto.Message) error {
		return status.Error(codes.FailedPrecondition, "no \x1b]0;title\a\x1b[2J\u202egnp.exe")
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	ok(t, err)
	g := grpc.NewServer()
	crustv1alpha1.RegisterRuntimeAssistedStorageManagementServer(g, r)
	go func() { _ = g.Serve(l) }() // until it is stopped
	t.Cleanup(g.Stop)
	out, _ := exec.Command(testnode.BuildCommand(t, "crustctl", ""), "--crust", "unix://"+socket, "doctor").CombinedOutput()
	for _, bad := range []string{"\x1b", "\a", "\u202e"} {
		if strings.Contains(string(out), bad) {
			t.Errorf("the terminal gets %q", bad)
		}
	}
	if want := `no \x1b]0;title\x07\x1b[2J\u202egnp.exe`; !strings.Contains(string(out), want) {
		t.Errorf("no %s in %s", want, out)
	}
}
