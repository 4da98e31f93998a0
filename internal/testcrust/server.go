// Package testcrust runs the real crustd and crust-agent for tests, next to a csi-node of
// internal/testnode. The test plays the API server and the container runtime.
package testcrust

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Size is the size of the volumes, in bytes.
const Size = 320 << 20

var longest atomic.Int64

// Longest is the time limit of one call: a minute, or the value given to Allow.
func Longest() time.Duration { return max(time.Minute, time.Duration(longest.Load())) }

// Allow sets the time limit of calls. Tests with guests need it.
func Allow(d time.Duration) { longest.Store(int64(d)) }

// Context returns the context for a test's call.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*Longest())
	t.Cleanup(cancel)
	return ctx
}

// OK fails the test on an error.
func OK(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Refused checks that the error has this code, and that its text contains the words.
func Refused(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Fatalf("want %s, got %v", code, err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// Eventually polls until is returns true.
func Eventually(t testing.TB, most time.Duration, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(most); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %s it is still not so: %s", most, what)
		}
	}
}

// Server is a crustd next to a csi-node.
type Server struct {
	T       testing.TB
	Node    *testnode.Node
	Client  *crust.Client
	Backend string
	Bin     string // the program
	Env     []string
	Args    []string
	Cmd     *exec.Cmd
	Log     *testnode.LogBuffer
}

// NewServer starts bin, a crustd, next to a node. At the end of the test it stops the process and
// checks for leftovers.
func NewServer(t testing.TB, node *testnode.Node, backend, bin string, args ...string) *Server {
	t.Helper()
	s := &Server{T: t, Node: node, Backend: backend, Bin: bin, Args: args}
	t.Cleanup(s.CleanUp)
	s.Start()
	return s
}

// Become stops the process and starts another program in its place, as an upgrade does.
func (s *Server) Become(bin string) {
	s.T.Helper()
	s.Stop()
	s.Bin = bin
	s.Start()
}

// Socket is the path of its socket.
func (s *Server) Socket() string { return filepath.Join(s.Node.Dir, "crust.sock") }

// StateDir is its --state-dir.
func (s *Server) StateDir() string { return filepath.Join(s.Node.Dir, "crust") }

// Launch starts the process without waiting for it to serve.
func (s *Server) Launch() {
	s.T.Helper()
	args := append([]string{
		"--endpoint", "unix://" + s.Socket(), "--backend", s.Backend, "--state-dir", s.StateDir(), "--kubelet-dir", s.Node.KubeletDir(),
		"-v", "4", "--timeout", Longest().String(),
	}, s.Args...)
	if !strings.Contains(strings.Join(s.Args, " "), "--allow-device") {
		args = append(args, "--allow-device", "/dev/loop*")
	}
	s.Cmd = exec.Command(s.Bin, args...)
	s.Cmd.Env = append(os.Environ(), s.Env...)
	s.Log = &testnode.LogBuffer{}
	s.Cmd.Stderr = s.Log
	OK(s.T, s.Cmd.Start())
}

// Start starts the process and waits until it serves.
func (s *Server) Start() {
	s.T.Helper()
	s.Launch()
	testnode.Listens(s.Socket(), Longest())
	var err error
	if s.Client, err = crust.Dial("unix://" + s.Socket()); err != nil {
		s.T.Fatal(err)
	}
	for deadline := time.Now().Add(Longest()); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if _, serr := os.Stat(s.Socket()); serr != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), Longest())
		_, err = s.Client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
		cancel()
		if err == nil {
			return
		}
	}
	s.T.Fatalf("crustd does not serve: %v\n%s", err, s.Log.String())
}

// Kill is kill -9.
func (s *Server) Kill() {
	if s.Cmd != nil {
		s.Client.Close()
		_ = s.Cmd.Process.Kill()
		_ = s.Cmd.Wait()
		s.Cmd = nil
	}
}

// Stop is SIGTERM; the process must exit successfully.
func (s *Server) Stop() {
	s.T.Helper()
	if s.Cmd != nil {
		s.Client.Close()
		OK(s.T, s.Cmd.Process.Signal(syscall.SIGTERM))
		if err := s.Cmd.Wait(); err != nil {
			s.T.Errorf("crustd ended with %v\n%s", err, s.Log.String())
		}
		s.Cmd = nil
	}
}

// Restart is kill -9 and a new process.
func (s *Server) Restart() { s.T.Helper(); s.Kill(); s.Start() }

// CleanUp stops it at the end of a test, and checks for leftovers.
func (s *Server) CleanUp() {
	if s.Cmd == nil {
		s.Env = nil
		s.Start()
	}
	if s.T.Failed() {
		s.T.Logf("crustd said:\n%s", s.Log.String())
	}
	ctx, cancel := context.WithTimeout(context.Background(), Longest())
	defer cancel()
	list, err := s.Client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	if err != nil {
		s.T.Error(err)
	}
	for _, sb := range list.GetSandboxes() {
		s.T.Errorf("left registered: %s", sb.GetSandboxId())
		_, _ = s.Client.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: sb.GetSandboxId()})
	}
	s.Stop()
	// Nothing of it may remain, whatever happened before.
	for _, dir := range []string{"sandboxes", "ns", "binds", "shown", "scratch"} {
		names, _ := os.ReadDir(filepath.Join(s.StateDir(), dir))
		for _, n := range names {
			s.T.Errorf("left in the state: %s/%s", dir, n.Name())
		}
	}
}

// Volume makes and stages a volume that may be deferred.
func (s *Server) Volume(name, fstype string, options ...string) csiclient.Volume {
	s.T.Helper()
	v := csiclient.Volume{FSType: fstype, MountFlags: options, Context: map[string]string{"allowRuntimeAssistedMount": "true"}}
	made, err := s.Node.Client.Create(Context(s.T), name, Size, v, nil, nil)
	OK(s.T, err)
	v.ID = made.GetVolumeId()
	OK(s.T, s.Node.Client.Stage(Context(s.T), v))
	return v
}

// Delete unstages and deletes a volume.
func (s *Server) Delete(v csiclient.Volume) {
	s.T.Helper()
	OK(s.T, s.Node.Client.Unstage(Context(s.T), v.ID))
	OK(s.T, s.Node.Client.Delete(Context(s.T), v.ID))
}
