package main

import (
	"io"
	"strings"
	"testing"
)

// A path alone is no endpoint. gRPC would take it for a name that DNS does not know.
func TestAnEndpointThatIsAPathIsToldAsOne(t *testing.T) {
	c := root()
	c.SetOut(io.Discard)
	c.SetErr(io.Discard)
	c.SetArgs([]string{"pool", "list", "--endpoint", "/run/csi.sock"})
	if err := c.Execute(); err == nil || !strings.Contains(err.Error(), `--endpoint "/run/csi.sock": give unix:///absolute/path`) {
		t.Errorf("%v", err)
	}
}
