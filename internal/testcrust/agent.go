package testcrust

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// Agent is a crust-agent in front of a server's csi-node. The test plays the API server and the
// container runtime's side of NRI; the driver, the runtime's CRUST server and the sandboxes are
// real.
type Agent struct {
	S       *Server
	At      testnode.Failpoints // if the program was built with them
	Dir     string
	NRI     *ContainerRuntime
	Kubelet *csiclient.Client
	Bin     string // the program

	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	log    *testnode.LogBuffer
}

const agentNamespace = "tenant"

// NewAgent starts bin, a crust-agent, in front of a server's csi-node.
func NewAgent(t testing.TB, s *Server, bin string) *Agent {
	t.Helper()
	a := &Agent{S: s, At: testnode.NewFailpoints(t), Dir: filepath.Join(s.Node.Dir, "agent"), Bin: bin, log: &testnode.LogBuffer{}}
	OK(t, os.MkdirAll(filepath.Join(a.Dir, "registry"), 0o700))
	a.NRI = newRuntime(t, filepath.Join(a.Dir, "nri.sock"))
	server := httptest.NewServer(http.HandlerFunc(a.apiServer))
	t.Cleanup(server.Close)
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "clusters": [{"name": "c", "cluster": {"server": %q}}]}`, server.URL)
	OK(t, os.WriteFile(filepath.Join(a.Dir, "kubeconfig"), []byte(config), 0o600))
	var err error
	a.Kubelet, err = csiclient.Dial("unix://"+filepath.Join(a.Dir, "agent.sock"), s.Node.KubeletDir())
	OK(t, err)
	t.Cleanup(func() { a.Kubelet.Close() })
	t.Cleanup(func() {
		a.Kill()
		if t.Failed() {
			t.Logf("crust-agent said:\n%s", a.log.String())
		}
	})
	a.Start()
	return a
}

// Start starts the process and waits until it serves and is connected to NRI.
func (a *Agent) Start() {
	a.S.T.Helper()
	cmd := exec.Command(a.Bin,
		"--driver", a.S.Node.Endpoint(), "--endpoint", "unix://"+filepath.Join(a.Dir, "agent.sock"),
		"--state-dir", filepath.Join(a.Dir, "state"),
		"--kubelet-registration-dir", filepath.Join(a.Dir, "registry"), "--nri-socket", a.NRI.socket, "--node-name", "node-1",
		"--kubeconfig", filepath.Join(a.Dir, "kubeconfig"), "-v", "4")
	cmd.Env = append(os.Environ(), a.At.Env()...)
	cmd.Stderr = a.log
	OK(a.S.T, cmd.Start())
	exited := make(chan struct{})
	a.cmd, a.exited = cmd, exited
	go func() { _ = cmd.Wait(); close(exited) }()
	testnode.Listens(filepath.Join(a.Dir, "agent.sock"), Longest())
	Eventually(a.S.T, Longest(), "crust-agent serves, and is connected to NRI", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), Longest())
		defer cancel()
		_, err := a.Kubelet.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		return err == nil && a.NRI.Plugin() != nil
	})
}

// Dead reports whether the process has ended.
func (a *Agent) Dead() bool {
	select {
	case <-a.exited:
		return true
	default:
		return false
	}
}

// Become stops the process and starts another program in its place, as an upgrade does.
func (a *Agent) Become(bin string) {
	a.S.T.Helper()
	a.Terminate()
	<-a.exited
	if !a.cmd.ProcessState.Success() {
		a.S.T.Errorf("crust-agent ended with %s\n%s", a.cmd.ProcessState, a.log.String())
	}
	a.Bin = bin
	a.Start()
}

// Terminate sends SIGTERM. Dead tells when the process has ended.
func (a *Agent) Terminate() {
	a.S.T.Helper()
	OK(a.S.T, a.cmd.Process.Signal(syscall.SIGTERM))
}

// Kill is kill -9.
func (a *Agent) Kill() {
	if a.cmd != nil {
		_ = a.cmd.Process.Kill()
		<-a.exited
	}
}

// apiServer answers the agent's requests for named objects. It has no watches: the agent requests
// every object that it has not been given.
func (a *Agent) apiServer(w http.ResponseWriter, r *http.Request) {
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
			ObjectMeta: metav1.ObjectMeta{Name: class,
				Annotations: map[string]string{"crust.csi.dev/fs-mgmt-socket": "unix://" + a.S.Socket()}},
		}
	case dir == "/api/v1/persistentvolumes/":
		answer = &corev1.PersistentVolume{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"}, ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PersistentVolumeSpec{StorageClassName: "class",
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
				ClaimRef:    &corev1.ObjectReference{Namespace: agentNamespace, Name: "claim"}},
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
