package crust

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// agent is a crust-agent before the csi-node of a server. What it asks an API server
// for, and the container runtime's side of NRI, is answered by the test; the driver,
// the runtime's CRUST server and the sandboxes are real.
type agent struct {
	s       *server
	at      testnode.Failpoints
	dir     string
	nri     *containerRuntime
	kubelet *csiclient.Client

	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	log    *testnode.LogBuffer
}

const agentNamespace = "tenant"

func newAgent(t *testing.T) *agent {
	t.Helper()
	s := newServer(t, "namespace", "")
	a := &agent{s: s, at: testnode.NewFailpoints(t), dir: filepath.Join(s.node.Dir, "agent"), log: &testnode.LogBuffer{}}
	ok(t, os.MkdirAll(filepath.Join(a.dir, "registry"), 0o700))
	a.nri = newContainerRuntime(t, filepath.Join(a.dir, "nri.sock"))
	server := httptest.NewServer(http.HandlerFunc(a.apiServer))
	t.Cleanup(server.Close)
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "clusters": [{"name": "c", "cluster": {"server": %q}}]}`, server.URL)
	ok(t, os.WriteFile(filepath.Join(a.dir, "kubeconfig"), []byte(config), 0o600))
	var err error
	a.kubelet, err = csiclient.Dial("unix://"+filepath.Join(a.dir, "agent.sock"), s.node.KubeletDir())
	ok(t, err)
	t.Cleanup(func() { a.kubelet.Close() })
	t.Cleanup(func() {
		a.kill()
		if t.Failed() {
			t.Logf("crust-agent said:\n%s", a.log.String())
		}
	})
	a.start()
	return a
}

func (a *agent) start() {
	a.s.t.Helper()
	cmd := testnode.LaunchCommand(a.s.t, "crust-agent", "failpoint", a.at.Env(), a.log,
		"--driver", a.s.node.Endpoint(), "--endpoint", "unix://"+filepath.Join(a.dir, "agent.sock"), "--state-dir", filepath.Join(a.dir, "state"),
		"--kubelet-registration-dir", filepath.Join(a.dir, "registry"), "--nri-socket", a.nri.socket, "--node-name", "node-1",
		"--kubeconfig", filepath.Join(a.dir, "kubeconfig"), "-v", "4")
	exited := make(chan struct{})
	a.cmd, a.exited = cmd, exited
	go func() { _ = cmd.Wait(); close(exited) }()
	eventually(a.s.t, longest, "crust-agent serves, and is connected to NRI", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := a.kubelet.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		return err == nil && a.nri.plugin() != nil
	})
}

// dead tells whether the process has ended.
func (a *agent) dead() bool {
	select {
	case <-a.exited:
		return true
	default:
		return false
	}
}

func (a *agent) kill() {
	if a.cmd != nil {
		_ = a.cmd.Process.Kill()
		<-a.exited
	}
}

// apiServer answers what the agent asks for by name. It has no watches: what an agent
// has not been told, it asks for.
func (a *agent) apiServer(w http.ResponseWriter, r *http.Request) {
	class := "sandbox"
	var answer any
	dir, name := filepath.Split(r.URL.Path)
	switch {
	case r.Method == http.MethodPost: // an event
		w.WriteHeader(http.StatusCreated)
		_, _ = io.Copy(w, r.Body)
		return
	case dir == "/api/v1/namespaces/"+agentNamespace+"/pods/":
		answer = &corev1.Pod{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Namespace: agentNamespace, Name: name, UID: types.UID("uid-" + name)},
			Spec: corev1.PodSpec{RuntimeClassName: &class, Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}}}}},
		}
	case dir == "/apis/node.k8s.io/v1/runtimeclasses/":
		answer = &nodev1.RuntimeClass{
			TypeMeta: metav1.TypeMeta{APIVersion: "node.k8s.io/v1", Kind: "RuntimeClass"}, Handler: "h",
			ObjectMeta: metav1.ObjectMeta{Name: class, Annotations: map[string]string{"crust.csi.dev/fs-mgmt-socket": "unix://" + a.s.socket()}},
		}
	case dir == "/api/v1/persistentvolumes/":
		answer = &corev1.PersistentVolume{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"}, ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PersistentVolumeSpec{StorageClassName: "class", AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
				ClaimRef: &corev1.ObjectReference{Namespace: agentNamespace, Name: "claim"}},
		}
	case dir == "/apis/storage.k8s.io/v1/storageclasses/":
		answer = &storagev1.StorageClass{
			TypeMeta:   metav1.TypeMeta{APIVersion: "storage.k8s.io/v1", Kind: "StorageClass"},
			ObjectMeta: metav1.ObjectMeta{Name: name}, Parameters: map[string]string{"allowRuntimeAssistedMount": "true"},
		}
	default:
		w.WriteHeader(http.StatusNotFound)
		answer = &metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Status:   "Failure", Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// containerRuntime is the runtime's side of NRI, as containerd has it: it calls one
// plugin, and tells it of the sandboxes at each connection.
type containerRuntime struct {
	socket string

	mu        sync.Mutex
	client    api.PluginService
	sandboxes map[string]*api.PodSandbox
}

func newContainerRuntime(t *testing.T, socket string) *containerRuntime {
	t.Helper()
	c := &containerRuntime{socket: socket, sandboxes: map[string]*api.PodSandbox{}}
	l, err := net.Listen("unix", socket)
	ok(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if err := c.connect(conn); err != nil {
				t.Errorf("NRI: %v", err)
			}
		}
	}()
	return c
}

func (c *containerRuntime) connect(conn net.Conn) error {
	mux := multiplex.Multiplex(conn, multiplex.WithBlockedRead())
	plugin, err := mux.Open(multiplex.PluginServiceConn)
	if err != nil {
		return err
	}
	l, err := mux.Listen(multiplex.RuntimeServiceConn)
	if err != nil {
		return err
	}
	s, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	var client api.PluginService
	client = api.NewPluginClient(ttrpc.NewClient(plugin, ttrpc.WithOnClose(func() {
		mux.Close()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.client == client {
			c.client = nil
		}
	})))
	api.RegisterRuntimeService(s, &registrar{c, client})
	go func() { _ = s.Serve(context.Background(), l) }()
	mux.Unblock()
	return nil
}

// registrar is told by a plugin that it is there.
type registrar struct {
	c      *containerRuntime
	client api.PluginService
}

func (r *registrar) RegisterPlugin(context.Context, *api.RegisterPluginRequest) (*api.Empty, error) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), longest)
		defer cancel()
		configure := &api.ConfigureRequest{RuntimeName: "containerd", RuntimeVersion: "2.1.0", NRIVersion: "v0.12.0"}
		if _, err := r.client.Configure(ctx, configure); err != nil {
			return // it has ended
		}
		r.c.mu.Lock()
		defer r.c.mu.Unlock()
		var all []*api.PodSandbox
		for _, sandbox := range r.c.sandboxes {
			all = append(all, sandbox)
		}
		if _, err := r.client.Synchronize(ctx, &api.SynchronizeRequest{Pods: all}); err == nil {
			r.c.client = r.client
		}
	}()
	return &api.Empty{}, nil
}

func (*registrar) UpdateContainers(context.Context, *api.UpdateContainersRequest) (*api.UpdateContainersResponse, error) {
	return nil, errors.New("nobody asks for it")
}

// plugin is the agent's side, nil while none is connected.
func (c *containerRuntime) plugin() api.PluginService {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.client
}
