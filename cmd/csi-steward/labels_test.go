package main

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-csi/crust-csi/internal/nodelabels"
)

// apiServer is an API server with one node. It returns a kubeconfig, and a function that lists the
// requests.
func apiServer(t *testing.T, node corev1.Node) (kubeconfig string, asked func() []string) {
	t.Helper()
	var list []string
	node.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		list = append(list, r.Method+" "+r.URL.Path)
		if r.URL.Path != "/api/v1/nodes/"+node.Name {
			http.Error(w, "there is no such node", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(node)
	}))
	t.Cleanup(s.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	text := `{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a}}],
		clusters: [{name: a, cluster: {server: "` + s.URL + `"}}]}`
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig, func() []string { return list }
}

// It reads only one object, its own node, so its role needs to allow no more.
func TestTheLabelsOfTheNodeAreWritten(t *testing.T) {
	labels := map[string]string{"kubernetes.io/hostname": "n1", "example.com/disk": "nvme", "empty": ""}
	kubeconfig, asked := apiServer(t, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: labels}})
	output := filepath.Join(t.TempDir(), "labels")
	if err := run([]string{"node-labels", "--node-name=n1", "--output", output, "--kubeconfig", kubeconfig}); err != nil {
		t.Fatal(err)
	}
	if got, err := nodelabels.Read(output); err != nil || !maps.Equal(got, labels) {
		t.Errorf("%v, %v", got, err)
	}
	if want := []string{"GET /api/v1/nodes/n1"}; !slices.Equal(asked(), want) {
		t.Errorf("asked: %v", asked())
	}
}

func TestLabelsThatCannotBeWritten(t *testing.T) {
	kubeconfig, _ := apiServer(t, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"a": "b"}}})
	output := filepath.Join(t.TempDir(), "labels")
	t.Setenv("NODE_NAME", "")
	for words, args := range map[string][]string{
		"the labels of node n2":    {"--node-name=n2", "--output", output},
		"give --node-name":         {"--output", output},
		"--output FILE":            {"--node-name=n1"},
		"--output: open /nowhere/": {"--node-name=n1", "--output=/nowhere/labels"},
	} {
		if err := run(append([]string{"node-labels", "--kubeconfig", kubeconfig}, args...)); err == nil ||
			!strings.Contains(err.Error(), words) {
			t.Errorf("%v: %v; want %s", args, err, words)
		}
	}
	if _, err := parse([]string{"cluster", "--output", output}); err == nil || !strings.Contains(err.Error(), "--output") {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(output); err == nil {
		t.Error("a file was written")
	}
}
