package crust

import (
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// On a node without NRI, crust-agent is not ready. Its /readyz and its log name the socket and the remedy.
func TestFleet_WithoutNRI(t *testing.T) {
	t.Parallel()
	for what, prepare := range map[string]func(socket string){
		"missing": func(string) {},
		"refused": func(socket string) {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
			ok(t, err)
			l.SetUnlinkOnClose(false)
			ok(t, l.Close())
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			nri := filepath.Join(dir, "nri.sock")
			prepare(nri)
			ok(t, os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
				"contexts": [{"name": "c", "context": {"cluster": "c"}}],
				"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}]}`), 0o600))
			free, err := net.Listen("tcp", "127.0.0.1:0")
			ok(t, err)
			metrics, log := free.Addr().String(), &testnode.LogBuffer{}
			ok(t, free.Close())
			agent := testnode.LaunchCommand(t, "crust-agent", "", nil, log, "--driver", "unix://"+dir+"/no-driver.sock",
				"--endpoint", "unix://"+dir+"/agent.sock", "--kubelet-registration-dir", dir, "--nri-socket", nri, "--node-name", "n",
				"--kubeconfig", dir+"/kubeconfig", "--state-dir", dir+"/state", "--metrics-address", metrics)
			defer func() { _ = agent.Process.Kill(); _ = agent.Wait() }()
			remedied := func(text string) bool {
				return strings.Contains(text, nri) && strings.Contains(text, "enable NRI in containerd's configuration") &&
					strings.Contains(text, "docs/crust-on-kubernetes.md")
			}
			answer := ""
			testcrust.Eventually(t, testcrust.Longest(), "crust-agent answers that NRI is missing", func() bool {
				r, err := http.Get("http://" + metrics + "/readyz")
				if err != nil {
					return false
				}
				b, err := io.ReadAll(r.Body)
				r.Body.Close()
				answer = string(b)
				return err == nil && !strings.Contains(answer, "NRI is not connected yet")
			})
			if !remedied(answer) {
				t.Errorf("/readyz: %s", answer)
			}
			testcrust.Eventually(t, testcrust.Longest(), "crust-agent logs that NRI is missing", func() bool {
				return strings.Contains(log.String(), nri)
			})
			for line := range strings.Lines(log.String()) {
				if strings.Contains(line, nri) && (!remedied(line) || !strings.Contains(line, "level=WARN")) {
					t.Errorf("its log: %s", line)
				}
			}
		})
	}
}
