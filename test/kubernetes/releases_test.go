//go:build kubernetes

package kubernetes_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// release is what the chart's upgrade begins with. images is empty if it is today's version under another tag.
type release struct{ version, source, images string }

// lastRelease returns the last line of test/skew/releases.
func lastRelease(t testing.TB, project string) release {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(onNode(t, "cat "+project+"/test/skew/releases")), "\n")
	version, _, _ := strings.Cut(lines[len(lines)-1], " ")
	return release{version, filepath.Join(project, ".cache/skew", version, "source"), filepath.Join(project, ".cache/image", version)}
}

// load puts the images on the nodes, at the same time.
func (r release) load(t testing.TB, nodes []string) {
	t.Helper()
	done := make(chan error)
	for _, node := range nodes {
		go func() {
			script := "for f in " + r.images + "/*.tar; do ctr -n k8s.io images import --local $f; done"
			if r.images == "" {
				script = "for i in csi-node csi-steward crustd crust-agent crustd-vm; do i=localhost/crust-csi/$i; " +
					"ctr -n k8s.io images tag --force $i:dev $i:" + r.version + "; done"
			}
			_, err := on(t.Context(), node, "", "bash", "-euc", script)
			done <- err
		}()
	}
	for range nodes {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(wait(4 * time.Minute)):
			t.Fatal("the images of the release are not loaded")
		}
	}
}

// tags returns the arguments of helm that set the tags of the project's images. v0.1.0 has none for microVMs.
func tags(tag string, microVMs bool) string {
	values := []string{"csiNode", "steward", "crust.crustd", "crust.agent"}
	if microVMs {
		values = append(values, "crust.microVM")
	}
	set := ""
	for _, value := range values {
		set += " --set " + value + ".image.tag=" + tag
	}
	return set
}
