package monitoring

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// daemon is a process beside csi-node.
type daemon struct {
	name    string
	cmd     *exec.Cmd
	ended   bool
	metrics string // HOST:PORT
}

func newDaemon(t *testing.T, name string, args ...string) *daemon {
	t.Helper()
	d := &daemon{name: name, metrics: freeAddress(t)}
	log := &testnode.LogBuffer{}
	d.cmd = testnode.LaunchCommand(t, name, "", nil, log, append(args, "--metrics-address", d.metrics, "-v", "4")...)
	t.Cleanup(func() {
		d.kill()
		if t.Failed() {
			t.Logf("%s said:\n%s", name, log)
		}
	})
	eventually(t, name+" serves metrics", func() bool {
		r, err := http.Get("http://" + d.metrics + "/healthz")
		if err != nil {
			return false
		}
		return r.Body.Close() == nil
	})
	return d
}

func (d *daemon) kill() {
	if !d.ended {
		d.ended = true
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
	}
}

// newCrustd starts a crustd without sandboxes: the tests only need it to be there.
func newCrustd(t *testing.T, n *testnode.Node) (d *daemon, socket string) {
	t.Helper()
	socket = filepath.Join(n.Dir, "crust.sock")
	t.Cleanup(func() { // the test kills crustd, which leaves its directory of namespaces mounted
		if err := syscall.Unmount(filepath.Join(n.Dir, "crust/ns"), syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return newDaemon(t, "crustd", "--endpoint", "unix://"+socket, "--state-dir", filepath.Join(n.Dir, "crust"), "--kubelet-dir",
		n.KubeletDir(),
		"--allow-device", "/dev/loop*"), socket
}

// newAgent starts a crust-agent before a node's csi-node, with this test's API server and no
// container runtime.
func newAgent(t *testing.T, n *testnode.Node, crust string) (d *daemon, endpoint string) {
	t.Helper()
	dir := filepath.Join(n.Dir, "agent")
	ok(t, os.MkdirAll(filepath.Join(dir, "registry"), 0o700))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { apiServer(w, r, crust) }))
	t.Cleanup(server.Close)
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "clusters": [{"name": "c", "cluster": {"server": %q}}]}`, server.URL)
	ok(t, os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte(config), 0o600))
	endpoint = "unix://" + filepath.Join(dir, "agent.sock")
	d = newDaemon(t, "crust-agent", "--driver", n.Endpoint(), "--endpoint", endpoint, "--state-dir", filepath.Join(dir, "state"),
		"--kubelet-registration-dir", filepath.Join(dir, "registry"), "--nri-socket", filepath.Join(dir, "nri.sock"), "--node-name", "one",
		"--kubeconfig", filepath.Join(dir, "kubeconfig"))
	eventually(t, "crust-agent serves", func() bool {
		_, err := os.Stat(strings.TrimPrefix(endpoint, "unix://"))
		return err == nil
	})
	return d, endpoint
}

// apiServer serves the objects that crust-agent gets by name: a pod with a claim of a class that
// leaves volumes to the runtime, whose CRUST server is at the socket.
func apiServer(w http.ResponseWriter, r *http.Request, socket string) {
	class, name := "sandbox", path.Base(r.URL.Path)
	of := func(version, kind string) metav1.TypeMeta { return metav1.TypeMeta{APIVersion: version, Kind: kind} }
	claim := corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}}
	answers := map[string]any{
		"pods": &corev1.Pod{TypeMeta: of("v1", "Pod"), ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: name,
			UID: types.UID("uid-" + name)},
			Spec: corev1.PodSpec{RuntimeClassName: &class, Volumes: []corev1.Volume{{Name: "v", VolumeSource: claim}}}},
		"runtimeclasses": &nodev1.RuntimeClass{TypeMeta: of("node.k8s.io/v1", "RuntimeClass"), Handler: "h",
			ObjectMeta: metav1.ObjectMeta{Name: class, Annotations: map[string]string{"crust.csi.dev/fs-mgmt-socket": "unix://" + socket}}},
		"persistentvolumes": &corev1.PersistentVolume{TypeMeta: of("v1", "PersistentVolume"), ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PersistentVolumeSpec{StorageClassName: "class",
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
				ClaimRef:    &corev1.ObjectReference{Namespace: "tenant", Name: "claim"}}},
		"storageclasses": &storagev1.StorageClass{TypeMeta: of("storage.k8s.io/v1", "StorageClass"),
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Parameters: map[string]string{"allowRuntimeAssistedMount": "true"}},
	}
	w.Header().Set("Content-Type", "application/json")
	answer, ok := answers[path.Base(path.Dir(r.URL.Path))]
	switch {
	case r.Method == http.MethodPost: // an event
		w.WriteHeader(http.StatusCreated)
		_, _ = io.Copy(w, r.Body)
		return
	case !ok: // watches; the agent then gets objects by name
		w.WriteHeader(http.StatusNotFound)
		answer = &metav1.Status{TypeMeta: of("v1", "Status"), Status: "Failure", Reason: metav1.StatusReasonNotFound,
			Code: http.StatusNotFound}
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// disk mounts a small ext4, and unmounts it when the test ends.
func disk(t *testing.T, size string) (at string) {
	t.Helper()
	img := filepath.Join(t.TempDir(), "disk")
	run(t, "truncate", "-s", size, img)
	run(t, "mkfs.ext4", "-q", "-m", "0", img)
	device := run(t, "losetup", "-f", "--show", img)
	t.Cleanup(func() { run(t, "losetup", "-d", device) })
	at = t.TempDir()
	run(t, "mount", device, at)
	t.Cleanup(func() { testnode.Unmount(t, at) })
	return at
}

// since returns how long something took, for the log.
func since(begin time.Time) time.Duration { return time.Since(begin).Round(time.Millisecond) }
