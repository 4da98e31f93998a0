package node

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestLeast_MkfsIsConfined replaces mkfs by a program that reports its privileges in the error of
// the stage that runs it.
func TestLeast_MkfsIsConfined(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	if strings.Contains(n.Log(), "cannot be confined") {
		t.Error("the driver's first program is not confined: see its log")
	}
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	withPrograms(t, n, map[string]string{"mkfs.ext4": `chroot / true; ls ` + n.Dir + `; echo directories: /*; exit 1`})
	err := n.Client.Stage(ctxOf(t), v)
	refused(t, err, codes.Internal, "Operation not permitted", "No such file")
	for _, dir := range []string{"/home", "/root", "/var", "/tmp", "/boot"} {
		if _, list, _ := strings.Cut(err.Error(), "directories: "); strings.Contains(list, dir) {
			t.Errorf("it sees %s: %v", dir, err)
		}
	}
	n.Env = nil
	n.Restart()
	ok(t, n.Client.Stage(ctxOf(t), v))
	down(t, n, v.ID)
}
