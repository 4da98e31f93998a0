package documents

import (
	"os/exec"
	"strings"
	"testing"
)

// architecture.md: crust-guest and crust-oci link nothing of OpenTelemetry, and programs that send
// no spans do not link the exporter.
func TestTraces_WhoLinksWhat(t *testing.T) {
	const api, sdk = "go.opentelemetry.io/", "go.opentelemetry.io/otel/sdk"
	for program, never := range map[string]string{"crust-guest": api, "crust-oci": api, "csi-steward": sdk, "crustctl": sdk} {
		linksNot(t, "./cmd/"+program, never)
	}
}

// The mount engine knows nothing of Kubernetes, and the programs that only mount link nothing of it:
// a guest has little memory.
func TestTheMountEngineLinksNothingOfKubernetes(t *testing.T) {
	for _, importer := range []string{
		"./cmd/crust-guest", "./cmd/crust-oci", "./cmd/crustd", "./pkg/mounter", "./pkg/mounter/fsprogs", "./pkg/mounter/ownership",
		"./pkg/volume", "./pkg/crust",
	} {
		linksNot(t, importer, "k8s.io/")
	}
}

// Who calls the agent from something else than NRI does not link the 34 packages of wazero.
func TestTheOrchestratorLinksNoNRI(t *testing.T) {
	for _, never := range []string{"github.com/containerd/nri/", "github.com/tetratelabs/wazero"} {
		linksNot(t, "./pkg/orchestrator", never)
	}
}

func linksNot(t *testing.T, importer, never string) {
	t.Helper()
	c := exec.Command("go", "list", "-deps", importer)
	c.Dir = project
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	if _, found, ok := strings.Cut("\n"+string(out), "\n"+never); ok {
		found, _, _ = strings.Cut(found, "\n")
		t.Errorf("%s links %s%s", importer, never, found)
	}
}
