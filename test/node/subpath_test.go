package node

import (
	"maps"
	"os"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// C15, C24: the placeholder of a volume whose pod has sub-paths holds a directory for each. A kubelet binds them, and csi-node takes
// the placeholder away whether or not they are bound. A volume that is not deferred gets no directories.
func TestC15_C24_ADeferredVolumeHasPlacesForSubPaths(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "v", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	v.Context = maps.Clone(v.Context)
	v.Context[crust.ContextSubPaths], v.Context[crust.ContextKernel] = `["a/b","c"]`, "host"
	target := n.Target("v")
	for range 2 {
		_, deferred, err := publishTo(t, n, v, target, false, "ext4")
		ok(t, err)
		if !deferred {
			t.Fatal("it was not deferred")
		}
	}
	elsewhere := t.TempDir()
	for _, dir := range []string{"", "/a", "/a/b", "/c"} {
		if st, err := os.Stat(target + dir); err != nil || st.Mode() != os.ModeDir {
			t.Errorf("%s: %v, %v", dir, st, err)
		}
		if err := os.Mkdir(target+dir+"/d", 0o755); err == nil {
			t.Errorf("%s can be written to", dir)
		}
	}
	if out, err := exec.Command("mount", "--bind", target+"/a/b", elsewhere).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	testnode.Unmount(t, elsewhere)
	if left := mountsOf(t, n); strings.Contains(left, "crust-deferred") {
		t.Errorf("left: %s", left)
	}
	_, deferred, err := publishTo(t, n, v, target, false)
	ok(t, err)
	if names, err := os.ReadDir(target); deferred || err != nil || len(names) != 1 || names[0].Name() != "lost+found" {
		t.Errorf("mounted here: %v, %v, %v", !deferred, names, err)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	v.Context[crust.ContextSubPaths] = `["../up"]`
	_, _, err = publishTo(t, n, v, target, false, "ext4")
	refused(t, err, codes.InvalidArgument, "a path inside the volume is needed")
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}
