//go:build kubernetes

package kubernetes_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var block = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")

// Runs every command of the page, word by word, on the node. Only its pod's image differs, because
// there is no registry here.
func TestInstallDoc(t *testing.T) {
	s := &space{t: t, ns: "default"}
	page, err := os.ReadFile("../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := block.FindAllSubmatch(page, -1)
	if len(blocks) < 5 {
		t.Fatalf("%d blocks of commands", len(blocks))
	}
	project, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	// Restore what other tests use.
	t.Cleanup(func() {
		if err := install(); err != nil {
			t.Error(err)
		}
	})
	s.kubectl("delete", "daemonset", "crust", "crust-agent", "-n", system, "--timeout=60s", "--ignore-not-found")
	var out string
	for _, b := range blocks {
		script := strings.ReplaceAll(string(b[1]), "image: busybox:1.36", "image: localhost/test/busybox:1")
		begin := time.Now()
		said, err := onNodeIn(project, script)
		if err != nil {
			t.Fatalf("%v\n%s", err, script)
		}
		t.Logf("%s: %s", time.Since(begin).Round(time.Second), strings.SplitN(script, "\n", 2)[0])
		out += said + "\n"
	}
	for _, want := range []string{"csi.crust.dev", "pod/mine condition met", "hello", "2000", "persistentvolumeclaim/mine condition met",
		"CAP_SYS_RESOURCE"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q was not seen in:\n%s", want, out)
		}
	}
	t.Run("Helm", func(t *testing.T) { theChart(t, project) })
}
