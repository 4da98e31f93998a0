package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestMain lets the test binary act as crust-oci.
func TestMain(m *testing.M) {
	if os.Getenv("CRUST_OCI_TEST") != "" {
		main()
	}
	os.Exit(m.Run())
}

// create runs crust-oci create for a container with these annotations, in front of a runtime that
// does nothing.
func create(t *testing.T, annotations map[string]string) (string, error) {
	t.Helper()
	bundle := t.TempDir()
	b, err := json.Marshal(map[string]any{"annotations": annotations})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(self, "create", "--bundle", bundle, "id")
	c.Env = append(os.Environ(), "CRUST_OCI_TEST=1", "CRUST_OCI_RUNTIME=/bin/true", "CRUST_ENDPOINT=unix://"+bundle+"/nobody")
	out, err := c.CombinedOutput()
	return string(out), err
}

// CRI-O passes a pod's annotations to the runtime, so a pod can name another pod's sandbox as
// containerd would. Only the annotations of the container's own runtime count. If two disagree, the
// container is refused.
func TestALow_APodCannotNameAnotherSandbox(t *testing.T) {
	const (
		containerd, crio, ours = "io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID", "csi.crust.dev/sandbox-id"
		containerdType         = "io.kubernetes.cri.container-type"
		crioType               = "io.kubernetes.cri-o.ContainerType"
	)
	for name, c := range map[string]struct {
		annotations map[string]string
		sandbox     string // what is accepted; empty: refused
		isSandbox   bool
	}{
		"containerd":                        {map[string]string{containerd: "a", containerdType: "container"}, "a", false},
		"containerd's sandbox":              {map[string]string{containerd: "a", containerdType: "sandbox"}, "a", true},
		"CRI-O":                             {map[string]string{crio: "b", crioType: "container"}, "b", false},
		"CRI-O's sandbox":                   {map[string]string{crio: "b", crioType: "sandbox"}, "b", true},
		"somebody else":                     {map[string]string{ours: "c"}, "c", false},
		"nobody":                            {map[string]string{"a": "b"}, "", false},
		"the same twice":                    {map[string]string{containerd: "a", crio: "a"}, "a", false},
		"CRI-O, and a forged sandbox":       {map[string]string{crio: "b", containerd: "victim"}, "", false},
		"CRI-O, and a forged one of ours":   {map[string]string{crio: "b", ours: "victim"}, "", false},
		"containerd, and a forged one":      {map[string]string{containerd: "a", ours: "victim"}, "", false},
		"CRI-O, and a container as sandbox": {map[string]string{crio: "b", crioType: "container", containerdType: "sandbox"}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			refused := c.sandbox == "" && name != "nobody"
			out, err := create(t, c.annotations)
			if (err != nil) != refused || refused && !strings.Contains(out, "say different things") {
				t.Errorf("%v %s", err, out)
			}
			s := &spec{doc: map[string]any{"annotations": map[string]any{}}}
			for k, v := range c.annotations {
				s.doc["annotations"].(map[string]any)[k] = v
			}
			id, isSandbox, err := s.sandbox()
			if id != c.sandbox || isSandbox != c.isSandbox || (err != nil) != refused {
				t.Errorf("%q %v %v", id, isSandbox, err)
			}
		})
	}
}
