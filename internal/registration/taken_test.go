package registration

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pluginv1 "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// The driver's next version comes with its own registrar again (node-driver-registrar), which removes the socket that is there and makes
// its own. The kubelet then calls the driver, past the agent. /readyz must say so.
func TestAnotherRegistrarTakesTheSocket(t *testing.T) {
	dir := t.TempDir()
	s, err := Serve(dir, "d", "unix:///agent.sock", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	_, err = s.NotifyRegistrationStatus(t.Context(), &pluginv1.RegistrationStatus{PluginRegistered: true})
	if err != nil || s.Err() != nil {
		t.Fatal(err, s.Err())
	}
	path := filepath.Join(dir, "d-reg.sock")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := s.Err(); err == nil || !strings.Contains(err.Error(), "somebody removed "+path) {
		t.Errorf("without its socket the agent is ready: %v", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if s.Err() == nil {
		t.Error("the agent says that it is registered, and the kubelet asks somebody else")
	}
	s.Stop()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the end of the agent removes the other's registration: %v", err)
	}
}
