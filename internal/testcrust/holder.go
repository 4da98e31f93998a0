package testcrust

import (
	"os/exec"
	"testing"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// NewHolder starts the process; it is not registered anywhere yet.
func (s *Server) NewHolder(t testing.TB, id string) *Holder {
	t.Helper()
	n := &Holder{T: t, S: s, ID: id, Cmd: exec.Command("sleep", "3600")}
	OK(t, n.Cmd.Start())
	t.Cleanup(n.Kill)
	return n
}

// Holder is a sandbox of the namespace backend. Its process stands for the one that holds a pod's
// namespaces.
type Holder struct {
	T   testing.TB
	S   *Server
	ID  string
	Cmd *exec.Cmd
}

// Kill ends it without asking.
func (n *Holder) Kill() {
	if n.Cmd.ProcessState == nil {
		_ = n.Cmd.Process.Kill()
		_ = n.Cmd.Wait()
	}
}

// Path is the path in the sandbox of a host target.
func (n *Holder) Path(target string) string { return target }

// Pin is the path of its mount namespace.
func (n *Holder) Pin() string {
	list, err := n.S.Client.ListSandboxes(Context(n.T), &crustv1alpha1.ListSandboxesRequest{})
	OK(n.T, err)
	for _, sb := range list.GetSandboxes() {
		if sb.GetSandboxId() == n.ID {
			return sb.GetMountNamespace()
		}
	}
	n.T.Fatalf("sandbox %s is not registered", n.ID)
	return ""
}

// Exec runs a shell command in it.
func (n *Holder) Exec(command string) (string, error) {
	out, err := exec.Command("nsenter", "--mount="+n.Pin(), "sh", "-c", command).CombinedOutput()
	return string(out), err
}
