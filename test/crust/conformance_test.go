package crust

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust/conformance"
)

// crustd keeps the contract that docs/runtime-authors.md describes, with each kind of sandbox.
func TestC11_CrustdConforms(t *testing.T) {
	for _, backend := range []string{"namespace", "qemu"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, backend, "")
			args := []string{"conformance", "pod", "--crust", "unix://" + s.Socket(), "--kubelet-dir", s.Node.KubeletDir(), "--dir",
				t.TempDir(), "--timeout", patience(t).String(), "-o", "json"}
			p := s.pod("pod", csiclient.Volume{})
			want := conformance.NotChecked // there is only one guest
			if backend == "qemu" {
				s.boot(p, "q35", "")
			} else {
				other := s.pod("other", csiclient.Volume{})
				s.namespace(p)
				s.namespace(other)
				defer s.deregister(other)
				args, want = append(args, "--other", "other"), conformance.Passed
			}
			defer s.deregister(p)
			c := exec.Command(testnode.BuildCommand(t, "crustctl", ""), args...)
			var said strings.Builder
			c.Stderr = &said
			out, err := c.Output()
			if err != nil {
				t.Fatalf("%v\n%s%s", err, out, said.String())
			}
			var results []conformance.Result
			ok(t, json.Unmarshal(out, &results))
			for _, r := range results {
				if r.Outcome != conformance.Passed && (r.Outcome != want || !strings.Contains(r.Check, "another sandbox")) {
					t.Errorf("%s: %s %s", r.Check, r.Outcome, r.Detail)
				}
			}
		})
	}
}
