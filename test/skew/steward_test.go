package skew

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

const (
	namespace = "shop"
	podName   = "db-0"
	claimName = "orders"
)

// apiServer is an API server with one claim. It keeps the events that it is sent.
type apiServer struct {
	t          *testing.T
	kubeconfig string
	volume     string // of the claim

	mu     sync.Mutex
	events []corev1.Event
}

func newAPIServer(t *testing.T, volume string) *apiServer {
	t.Helper()
	s := &apiServer{t: t, kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"), volume: volume}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "clusters": [{"name": "c", "cluster": {"server": %q}}]}`, server.URL)
	ok(t, os.WriteFile(s.kubeconfig, []byte(config), 0o600))
	return s
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const all = "/api/v1/namespaces/" + namespace
	var answer any
	code := http.StatusOK
	switch r.Method + " " + r.URL.Path {
	case "POST " + all + "/events":
		body, err := io.ReadAll(r.Body)
		event := &corev1.Event{}
		if err == nil {
			_, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, nil, event)
		}
		if err != nil {
			s.t.Errorf("an event: %v: %q", err, body)
		}
		s.mu.Lock()
		s.events = append(s.events, *event)
		s.mu.Unlock()
		event.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Event"}
		answer, code = event, http.StatusCreated
	case "GET " + all + "/persistentvolumeclaims/" + claimName:
		answer = &corev1.PersistentVolumeClaim{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolumeClaim"},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: claimName, UID: "uid-of-claim"},
			Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: s.volume},
		}
	default:
		s.t.Errorf("csi-steward requests %s %s", r.Method, r.URL)
		code = http.StatusNotFound
		answer = &metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure",
			Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

// about returns the objects with an event of a reason, and the events' texts.
func (s *apiServer) about(reason string) (objects, texts []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events {
		if o := e.InvolvedObject; e.Reason == reason && e.Type == corev1.EventTypeWarning {
			objects = append(objects, fmt.Sprintf("%s %s/%s %s", o.Kind, o.Namespace, o.Name, o.UID))
			texts = append(texts, e.Message)
		}
	}
	slices.Sort(objects)
	return objects, texts
}

// runSteward runs "csi-steward node" until the function returns.
func runSteward(t *testing.T, n *testnode.Node, version string, s *apiServer, f func()) {
	t.Helper()
	log := &testnode.LogBuffer{}
	c := exec.Command(program(t, version, "csi-steward"), "node", "--adopt=false", "--node-name", "node-1", "-v", "4",
		"--csi-address", strings.TrimPrefix(n.Endpoint(), "unix://"), "--kubeconfig", s.kubeconfig)
	c.Stderr = log
	ok(t, c.Start())
	defer func() {
		ok(t, errors.Join(c.Process.Signal(syscall.SIGTERM), c.Wait()))
		if t.Failed() {
			t.Logf("csi-steward of %s said:\n%s", version, log)
		}
	}()
	f()
}

// TestAStewardOfAnotherVersion: csi-node and csi-steward are in different DaemonSets, so a rolling
// update brings together either of a release and the other of today. In both pairs, a fault of a
// volume becomes events on its pod and its claim. The pod began before the update.
func TestAStewardOfAnotherVersion(t *testing.T) {
	forEachRelease(t, func(t *testing.T, release string) {
		n := testnode.NewStopped(t, "")
		n.Bin = program(t, release, "csi-node")
		n.Begin()
		v := csiclient.Volume{FSType: "ext4"}
		made, err := n.Client.Create(ctxOf(t), "pvc-0f5a", size, v,
			map[string]string{inventory.ClaimNamespaceKey: namespace, inventory.ClaimNameKey: claimName}, nil)
		ok(t, err)
		v.ID, v.Context = made.GetVolumeId(), made.GetVolumeContext()
		ok(t, n.Client.Stage(ctxOf(t), v))
		inPod := v
		inPod.Context = map[string]string{"csi.storage.k8s.io/pod.name": podName, "csi.storage.k8s.io/pod.namespace": namespace,
			"csi.storage.k8s.io/pod.uid": "uid-of-pod"}
		for key, value := range v.Context {
			inPod.Context[key] = value
		}
		target := n.Target(podName)
		ok(t, n.Client.Publish(ctxOf(t), inPod, target, false))
		images, err := filepath.Glob(filepath.Join(n.PoolDir(), "*", "*.img"))
		if err != nil || len(images) != 1 {
			t.Fatalf("the files of one volume: %q, %v", images, err)
		}
		for _, pair := range []struct{ node, steward string }{{release, today}, {today, release}} {
			what := fmt.Sprintf("csi-node of %s, csi-steward of %s", pair.node, pair.steward)
			if n.Bin != program(t, pair.node, "csi-node") {
				becomes(t, n, pair.node)
			}
			s := newAPIServer(t, "pvc-0f5a")
			ok(t, os.Rename(images[0], images[0]+".away"))
			want := []string{"PersistentVolumeClaim shop/orders uid-of-claim", "Pod shop/db-0 uid-of-pod"}
			runSteward(t, n, pair.steward, s, func() {
				// It looks when it starts, and each minute.
				eventually(t, 2*testcrust.Longest(), what+": events on the pod and the claim", func() bool {
					objects, _ := s.about("ImageGone")
					return len(objects) >= len(want)
				})
			})
			objects, texts := s.about("ImageGone")
			if !slices.Equal(objects, want) {
				t.Errorf("%s: events on %q, want %q", what, objects, want)
			}
			for _, text := range texts {
				if !strings.HasPrefix(text, "volume pvc-0f5a: ") || !strings.Contains(text, images[0]) {
					t.Errorf("%s: an event's text is %q", what, text)
				}
			}
			ok(t, os.Rename(images[0]+".away", images[0]))
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		ok(t, n.Client.Delete(ctxOf(t), v.ID))
	})
}
