package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// The log says who has a volume's device mounted. The error, which becomes an event that a claim's
// owner reads, does not show the paths and processes of other pods. Not beside other tests: its
// namespace would keep their mounts.
func TestALow_ErrorsDoNotShowOtherPodsPaths(t *testing.T) {
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4", Context: deferrable})
	ok(t, n.Client.Stage(ctxOf(t), v))
	info, deferred, err := publishTo(t, n, v, n.Target("a"), false, "ext4")
	ok(t, err)
	if !deferred {
		t.Fatal("not deferred")
	}
	// Another tenant's container, in its own mount namespace.
	secret := filepath.Join(t.TempDir(), "a-path-of-another-tenant")
	ok(t, os.Mkdir(secret, 0o700))
	c := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c", "mount "+info.Source+" "+secret+" && echo ready && read _")
	in, err := c.StdinPipe()
	ok(t, err)
	out, err := c.StdoutPipe()
	ok(t, err)
	ok(t, c.Start())
	t.Cleanup(func() { _ = in.Close(); _ = c.Wait() })
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	err = n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a"))
	refused(t, err, codes.FailedPrecondition, "is still mounted by the sandbox", "the log says where")
	for _, word := range []string{"tenant", "process", "(sh)"} {
		if strings.Contains(err.Error(), word) {
			t.Errorf("the error says %q: %v", word, err)
		}
	}
	said(t, n, secret)
	ok(t, in.Close())
	_ = c.Wait() // it has no line to read
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	down(t, n, v.ID)
}
