package apiserver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const kubeconfig = `{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c"}}],
	"clusters": [{"name": "c", "cluster": {"server": "https://there.example:6443"}}]}`

// A daemon in a pod has both: an explicit kubeconfig wins.
func TestConfig(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBERNETES_SERVICE_PORT", "")
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := Config(path); err != nil || c.Host != "https://there.example:6443" {
		t.Errorf("with a kubeconfig: %+v, %v", c, err)
	}
	for _, none := range []string{"", path + "-that-is-not-there"} {
		if c, err := Config(none); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
			t.Errorf("%q: %+v, %v", none, c, err)
		}
	}
}
