package crust

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// D06: crust-agent waits until another registrar of its driver is gone. It is called all the while, because the kubelet knows its socket
// from before. SIGTERM lets the calls in flight finish then, too.
func TestD06_AnAgentThatIsNotRegisteredYetFinishesItsCalls(t *testing.T) {
	a := testcrust.NewAgent(t, newServer(t, "namespace", "").Server, testnode.BuildCommand(t, "crust-agent", "failpoint"))
	v := a.S.Volume("a", "ext4")
	p := a.Tenant(t, "pa", v)
	a.Kill()
	sockets, err := filepath.Glob(filepath.Join(a.Dir, "registry", "*-reg.sock"))
	ok(t, err)
	if len(sockets) != 1 {
		t.Fatalf("the agent has registered at %v", sockets)
	}
	ok(t, os.Remove(sockets[0]))
	other, err := net.Listen("unix", sockets[0])
	ok(t, err)
	defer other.Close()
	a.Start()
	hung, ended := a.At.Hang(t, "record.renamed", func() error { return p.Publish(ctxOf(t)) })
	if !hung {
		t.Fatalf("no call is in flight: %v", <-ended)
	}
	a.Terminate()
	testcrust.Eventually(t, testcrust.Longest(), "the agent takes no more calls", func() bool {
		_, err := os.Lstat(filepath.Join(a.Dir, "agent.sock"))
		return errors.Is(err, fs.ErrNotExist)
	})
	a.At.Off(t)
	if err := <-ended; err != nil {
		t.Errorf("a call in flight was cut off: %v", err)
	}
	testcrust.Eventually(t, testcrust.Longest(), "the agent ends", a.Dead)
	ok(t, other.Close())
	a.Start()
	ok(t, p.Unpublish(ctxOf(t)))
	nothingLeft(t, a)
	a.S.Delete(v)
}
