package node

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A machine without IPv6, whose services have umask 077 and speak German.
func TestFleet_AnOddMachine(t *testing.T) {
	t.Parallel()
	// The port is the namespace's own.
	const port = "9808"
	n := testnode.NewStopped(t, "", "--metrics-address", ":"+port)
	n.Under = []string{"unshare", "--net", "sh", "-ec", `v6=/proc/sys/net/ipv6/conf/all/disable_ipv6
[ ! -e $v6 ] || echo 1 >$v6
ip link set lo up
umask 077
export LC_ALL=C.UTF-8 LANGUAGE=de
exec "$@"`, "sh"}
	n.Begin()
	scrape := func() string {
		t.Helper()
		return run(t, "nsenter", "--net", "--target", itoa(n.PID()), "bash", "-ec",
			`exec 3<>/dev/tcp/127.0.0.1/$1; printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3; cat <&3`, "bash", port)
	}
	if out := run(t, "nsenter", "--net", "--target", itoa(n.PID()), "ip", "-6", "address"); out != "" {
		t.Fatalf("there is IPv6:\n%s", out)
	}
	for _, fs := range filesystems {
		v := create(t, n, fs, csiclient.Volume{FSType: fs})
		v.Group = "77"
		target := n.Target(fs)
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		ok(t, asPod(t, 77, in(target, "echo hello >f && [ $(cat f) = hello ]")))
		wantMetric(t, scrape(), `crust_filesystems_made_total{fs_type="`+fs+`"}`, "1")
		down(t, n, v.ID, target)
	}
	// What a program reports is read, and shown, in English.
	v := create(t, n, "refused", csiclient.Volume{FSType: "ext4"})
	withPrograms(t, n, map[string]string{"mkfs.ext4": "ls /nowhere; exit 1"})
	refused(t, n.Client.Stage(ctxOf(t), v), codes.Internal, "No such file or directory")
	n.Env, n.Args = nil, []string{"--metrics-address", "*:" + port} // every interface
	n.Restart()
	if now := scrape(); !strings.Contains(now, `crust_programs_started_total{program="mkfs.ext4"} 0`) {
		t.Errorf("its metrics:\n%s", now)
	}
	down(t, n, v.ID)
}
