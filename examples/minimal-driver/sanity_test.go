package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
)

// The driver passes csi-test's suite with real loop devices and mounts, so the test runs as root.
// The driver is stopped and restarted before the suite.
func TestSanity(t *testing.T) {
	dir, err := os.MkdirTemp("", "m") // short: a socket path has at most 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := os.Mkdir(in("kubelet"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, name := range []string{"pool", "state"} {
			if err := os.RemoveAll(in(name)); err != nil {
				t.Error(err)
			}
		}
		for _, name := range []string{"csi.sock", "kubelet", ""} { // the empty one: all volumes are unpublished
			if err := os.Remove(in(name)); err != nil {
				t.Error(err)
			}
		}
	})
	start := func() (stop func()) {
		ctx, cancel := context.WithCancel(context.Background())
		stopped := make(chan error, 1)
		go func() { stopped <- run(ctx, "node", in("csi.sock"), in("kubelet"), in("pool"), in("state")) }()
		for {
			conn, err := net.Dial("unix", in("csi.sock"))
			if err == nil {
				conn.Close()
				break
			}
			select {
			case err := <-stopped:
				t.Fatal(err)
			case <-time.After(10 * time.Millisecond):
			}
		}
		return func() {
			cancel()
			if err := <-stopped; err != nil {
				t.Error(err)
			}
		}
	}
	start()()
	defer start()()
	c := sanity.NewTestConfig()
	c.Address = "unix://" + in("csi.sock")
	c.TargetPath, c.StagingPath = filepath.Join(in("kubelet"), "pods"), filepath.Join(in("kubelet"), "staging")
	c.TestVolumeSize = 64 << 20
	sanity.Test(t, c)
}
