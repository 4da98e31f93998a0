package main

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
)

// The driver passes csi-test's suite: with real loop devices and mounts, so it runs as root.
func TestSanity(t *testing.T) {
	dir, err := os.MkdirTemp("", "m") // short: the path of a socket has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.RemoveAll(filepath.Join(dir, "pool"))
		os.RemoveAll(filepath.Join(dir, "kubelet"))
		os.Remove(dir)
	})
	socket, kubelet := filepath.Join(dir, "csi.sock"), filepath.Join(dir, "kubelet")
	if err := os.Mkdir(kubelet, 0o755); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- run("node", socket, kubelet, filepath.Join(dir, "pool")) }()
	for {
		conn, err := net.Dial("unix", socket)
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
	c := sanity.NewTestConfig()
	c.Address = "unix://" + socket
	c.TargetPath, c.StagingPath = filepath.Join(kubelet, "pods"), filepath.Join(kubelet, "staging")
	c.TestVolumeSize = 64 << 20
	sanity.Test(t, c)
}
