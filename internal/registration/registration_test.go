package registration

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginv1 "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// The test acts as the kubelet: it finds the socket, asks, and reports the result.
func TestTheKubeletIsAnswered(t *testing.T) {
	dir := t.TempDir()
	s, err := Serve(dir, "csi.example", "unix:///plugins/csi.sock", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "csi.example-reg.sock")
	if _, err := Serve(dir, "csi.example", "unix:///plugins/csi.sock", slog.Default()); err == nil ||
		!strings.Contains(err.Error(), "another server answers") {
		t.Errorf("a second one: %v", err)
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	kubelet := pluginv1.NewRegistrationClient(conn)
	info, err := kubelet.GetInfo(t.Context(), &pluginv1.InfoRequest{})
	if err != nil || info.Type != "CSIPlugin" || info.Name != "csi.example" || info.Endpoint != "/plugins/csi.sock" ||
		len(info.SupportedVersions) != 1 {
		t.Errorf("%v, %v", info, err)
	}
	if err := s.Err(); err == nil {
		t.Error("registered before the kubelet said so")
	}
	for _, st := range []*pluginv1.RegistrationStatus{{Error: "no such version"}, {PluginRegistered: true}} {
		if _, err := kubelet.NotifyRegistrationStatus(t.Context(), st); err != nil {
			t.Fatal(err)
		}
		if err := s.Err(); (err == nil) != st.PluginRegistered || err != nil && !strings.Contains(err.Error(), st.Error) {
			t.Errorf("%v: %v", st, err)
		}
	}
	s.Stop()
	for range 3000 {
		if _, err = os.Stat(socket); os.IsNotExist(err) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Error("the socket is still there")
}

func TestAnEndpointMustBeASocket(t *testing.T) {
	if _, err := Serve(t.TempDir(), "d", "tcp://1.2.3.4:5", slog.Default()); err == nil {
		t.Error("taken")
	}
}
