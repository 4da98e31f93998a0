// Package registration registers a CSI driver with the kubelet, as the node-driver-registrar
// sidecar does: through the kubelet's plugin registration service
// (k8s.io/kubelet/pkg/apis/pluginregistration/v1) on a socket in its directory of plugins.
package registration

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc"
	pluginv1 "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-csi/crust-csi/internal/privatesocket"
)

// Server answers the kubelet for one driver.
type Server struct {
	pluginv1.UnimplementedRegistrationServer
	driver, socket string
	path           string // of the registration's socket
	own            os.FileInfo
	log            *slog.Logger
	grpc           *grpc.Server
	state          atomic.Pointer[string]
}

const waiting = "the kubelet has not asked yet"

// Serve makes the socket DIR/DRIVER-reg.sock. endpoint is the driver's own, unix:///path, with the
// path that the kubelet sees.
func Serve(dir, driver, endpoint string, log *slog.Logger) (*Server, error) {
	socket, ok := strings.CutPrefix(endpoint, "unix://")
	if !ok || !filepath.IsAbs(socket) {
		return nil, fmt.Errorf("endpoint %q: give unix:///absolute/path", endpoint)
	}
	path := filepath.Join(dir, driver+"-reg.sock")
	l, err := privatesocket.Listen("unix://"+path, 0o600)
	if err != nil {
		return nil, fmt.Errorf("registration with the kubelet: %w", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // it may be another's by then
	own, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("registration with the kubelet: %w", err), l.Close())
	}
	s := &Server{driver: driver, socket: socket, path: path, own: own, log: log, grpc: grpc.NewServer()}
	s.set(waiting)
	pluginv1.RegisterRegistrationServer(s.grpc, s)
	go func() {
		if err := s.grpc.Serve(l); err != nil {
			log.Error("registration with the kubelet", "error", err)
		}
	}()
	return s, nil
}

func (s *Server) set(text string) { s.state.Store(&text) }

// Err returns nil once the kubelet has registered the driver.
func (s *Server) Err() error {
	if text := *s.state.Load(); text != "" {
		return errors.New("registration with the kubelet: " + text)
	}
	if _, err := os.Lstat(s.path); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("registration with the kubelet: somebody removed %s, so the kubelet calls the driver no longer; it does again once "+
			"this process was restarted", s.path)
	}
	if !s.mine() {
		return fmt.Errorf("registration with the kubelet: %s is no longer this process's; does the driver register itself, too?", s.path)
	}
	return nil
}

// Socket is the path of the registration's socket.
func (s *Server) Socket() string { return s.path }

// mine tells whether the socket is still this server's.
func (s *Server) mine() bool {
	st, err := os.Lstat(s.path)
	return err == nil && privatesocket.Same(st, s.own)
}

// Stop removes the socket, which tells the kubelet that the driver is gone.
func (s *Server) Stop() {
	if s.mine() {
		if err := os.Remove(s.path); err != nil {
			s.log.Warn("registration with the kubelet", "error", err)
		}
	}
	s.grpc.Stop()
}

// GetInfo tells the kubelet the driver's name and endpoint.
func (s *Server) GetInfo(context.Context, *pluginv1.InfoRequest) (*pluginv1.PluginInfo, error) {
	return &pluginv1.PluginInfo{Type: pluginv1.CSIPlugin, Name: s.driver, Endpoint: s.socket, SupportedVersions: []string{"1.0.0"}}, nil
}

// NotifyRegistrationStatus receives the result of the registration from the kubelet, which retries
// after a failure.
func (s *Server) NotifyRegistrationStatus(
	_ context.Context, st *pluginv1.RegistrationStatus,
) (*pluginv1.RegistrationStatusResponse, error) {
	if st.GetPluginRegistered() {
		s.log.Info("registered with the kubelet", "driver", s.driver, "socket", s.socket)
		s.set("")
	} else {
		s.log.Error("the kubelet did not register the driver", "driver", s.driver, "socket", s.socket, "error", st.GetError())
		s.set("refused: " + st.GetError())
	}
	return &pluginv1.RegistrationStatusResponse{}, nil
}
