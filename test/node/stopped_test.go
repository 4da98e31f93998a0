package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
)

// D06: a file system that has stopped because of errors takes no further mount. The answer says so, and what to do.
func TestD06_APublishOfAFileSystemThatHasStopped(t *testing.T) {
	t.Parallel()
	n, _ := switchable(t)
	v, target := up(t, n, "stopped", csiclient.Volume{FSType: "btrfs"})
	// Its device shrinks behind its back, so that it cannot write, and is whole again later.
	files, err := filepath.Glob(filepath.Join(n.PoolDir(), "volumes", "*.img"))
	ok(t, err)
	if len(files) != 1 {
		t.Fatalf("which file has the volume? %q", files)
	}
	st, err := os.Stat(files[0])
	ok(t, err)
	resize := func(size int64) {
		t.Helper()
		ok(t, os.Truncate(files[0], size))
		run(t, "sh", "-c", "losetup -n -O NAME -j "+files[0]+" | xargs -n 1 losetup --set-capacity")
	}
	resize(1 << 20)
	for i := 0; !strings.HasPrefix(superblockOptions(t, target), "ro,"); i++ {
		if i == 1000 {
			t.Fatal("btrfs does not stop")
		}
		_ = os.WriteFile(filepath.Join(target, fmt.Sprint(i)), []byte("x"), 0o600) // which may fail
		f, err := os.Open(target)
		ok(t, err)
		_ = linux.Syncfs(f) // the same
		ok(t, f.Close())
	}
	resize(st.Size())
	err = n.Client.Publish(ctxOf(t), v, n.Target("second"), false)
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "stopped taking writes because of errors") ||
		!strings.Contains(err.Error(), "Stop all pods") {
		t.Errorf("a second publish: %v", err)
	}
	down(t, n, v.ID, target)
}

// superblockOptions returns the options of a mount that are its superblock's, from the mount table.
func superblockOptions(t *testing.T, target string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	ok(t, err)
	for line := range strings.Lines(string(b)) {
		own, rest, _ := strings.Cut(strings.TrimSpace(line), " - ")
		if f := strings.Fields(own); len(f) > 4 && f[4] == target {
			return strings.Fields(rest)[2]
		}
	}
	t.Fatalf("%s is not mounted", target)
	return ""
}
