package conformance

import "testing"

func TestC11_AConfigWantsItsParts(t *testing.T) {
	if _, err := Run(t.Context(), Config{Sandbox: "one", KubeletDir: t.TempDir()}); err == nil {
		t.Error("it ran without a client")
	}
}
