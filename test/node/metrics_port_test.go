package node

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// freePort returns a port that nobody listens on.
func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	_, port, err := net.SplitHostPort(l.Addr().String())
	ok(t, err)
	ok(t, l.Close())
	return port
}

func TestA08_IdleConnectionsToTheMetricsPortTakeNothingFromCSI(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	n := testnode.New(t, "", "--metrics-address", "127.0.0.1:"+port)
	run(t, "prlimit", "--pid", itoa(n.PID()), "--nofile=256:256")
	for i := range 300 {
		c, err := net.Dial("tcp", "127.0.0.1:"+port)
		if i == 0 {
			ok(t, err) // else nothing would be held
		}
		if err != nil {
			break // no more are taken
		}
		defer c.Close()
		// Most send a request and stay, like a client that will send more. Some do not finish their
		// request.
		what := "GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n"
		if i%10 == 0 {
			what = "GET /metr"
		}
		_, _ = io.WriteString(c, what)
	}
	// Over a new connection, like a starting sidecar.
	client, err := csiclient.Dial(n.Endpoint(), n.KubeletDir())
	ok(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := client.Probe(ctx, &csi.ProbeRequest{}); err != nil {
		t.Errorf("Probe: %v", err)
	}
	h := http.Client{Timeout: time.Minute}
	for _, path := range []string{"/healthz", "/metrics"} {
		resp, err := h.Get("http://127.0.0.1:" + port + path)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", path, resp.Status)
		}
	}
	h.CloseIdleConnections()
}

func TestA08_WithoutAHostThePortIsThisMachines(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	listening := func() string {
		n := strings.Fields(run(t, "ss", "-Hltn", "sport = :"+port))
		if len(n) < 4 {
			t.Fatalf("nobody listens on %s: %v", port, n)
		}
		return n[3]
	}
	n := testnode.New(t, "", "--metrics-address", ":"+port)
	if at := listening(); at != "127.0.0.1:"+port {
		t.Errorf("it listens at %s", at)
	}
	n.Stop()
	n.Args = []string{"--metrics-address", "*:" + port}
	n.Start()
	if at := listening(); strings.HasPrefix(at, "127.0.0.1") {
		t.Errorf("it listens at %s", at)
	}
}
