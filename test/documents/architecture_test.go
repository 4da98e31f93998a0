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
		c := exec.Command("go", "list", "-deps", "./cmd/"+program)
		c.Dir = project
		out, err := c.Output()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains("\n"+string(out), "\n"+never) {
			t.Errorf("%s links %s", program, never)
		}
	}
}
