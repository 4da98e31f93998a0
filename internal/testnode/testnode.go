// Package testnode runs the real csi-node for tests: the binary as a process, real pools in a
// temporary directory, and a check for leftovers.
package testnode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
)

// Node is a csi-node process and its directories.
type Node struct {
	T           testing.TB
	Dir         string // contains everything
	Client      *csiclient.Client
	Args        []string // in addition to the usual ones
	Env         []string
	Under       []string // a command that execs the driver
	Pool        string   // directory of its pool, if not the usual one
	PoolName    string   // if not "pool"
	NoPoolFlag  bool     // a --config in Args has the pools
	PoolHangs   bool     // on purpose, so calls are not repeated
	PoolOptions string   // follows the directory in --pool, beginning with a comma
	Bin         string   // the program, if not today's

	cmd *exec.Cmd
	log *LogBuffer

	started []string // its descriptors after the start
}

// New makes a node with one loop pool named "pool" and starts it.
func New(t testing.TB, tags string, args ...string) *Node {
	t.Helper()
	n := NewStopped(t, tags, args...)
	n.Begin()
	return n
}

// shortDir is t.TempDir without the test's name: a socket path has at most 108 bytes.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := removeTree(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// removeTree removes a directory entry by entry, and stops at a mount, which may contain somebody's
// data.
func removeTree(dir string) error {
	var names []string
	err := filepath.WalkDir(dir, func(name string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(name)
		if err != nil {
			return err
		}
		if st, err := linux.StatxPath(name); info.IsDir() && (err != nil || st.MountRoot) {
			return errors.Join(fmt.Errorf("%s is a mount, and stays", name), err)
		}
		names = append(names, name)
		return nil
	})
	for _, name := range slices.Backward(names) {
		if err == nil {
			err = os.Remove(name)
		}
	}
	return err
}

// unbind clears a loop device.
func unbind(name string) error {
	f, err := os.OpenFile("/dev/"+name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return linux.LoopClear(f)
}

// NewStopped makes a node; Begin starts it.
func NewStopped(t testing.TB, tags string, args ...string) *Node {
	t.Helper()
	// Tests make many sparse volumes in little space.
	n := &Node{T: t, Dir: shortDir(t), PoolOptions: ",overcommit=1000,reserve=1Mi", Bin: Build(t, tags), Args: args}
	if err := os.MkdirAll(n.KubeletDir(), 0o750); err != nil {
		t.Fatal(err)
	}
	return n
}

// Begin starts the node. At the end of the test it stops the node and checks for leftovers.
func (n *Node) Begin() {
	n.T.Helper()
	n.T.Cleanup(n.cleanUp)
	n.Start()
}

// KubeletDir is the node's --kubelet-dir.
func (n *Node) KubeletDir() string { return filepath.Join(n.Dir, "kubelet") }

// PoolDir is the directory of its pool.
func (n *Node) PoolDir() string {
	if n.Pool != "" {
		return n.Pool
	}
	return filepath.Join(n.Dir, "pool")
}

// Endpoint is its socket.
func (n *Node) Endpoint() string { return "unix://" + filepath.Join(n.Dir, "csi.sock") }

// Target is the path where the kubelet would publish a pod's volume.
func (n *Node) Target(pod string) string {
	return filepath.Join(n.KubeletDir(), "pods", pod, "volumes/kubernetes.io~csi/pv/mount")
}

// Log returns the output of the process.
func (n *Node) Log() string { return n.log.String() }

// PID is the process's pid.
func (n *Node) PID() int { return n.cmd.Process.Pid }

// Launch starts the process without waiting for it to serve.
func (n *Node) Launch() {
	n.T.Helper()
	args := append([]string{
		"--endpoint", n.Endpoint(), "--node-id", "node-1",
		"--state-dir", filepath.Join(n.Dir, "state"), "--kubelet-dir", n.KubeletDir(), "--idmap-probe=false",
	}, n.Args...)
	if !n.NoPoolFlag {
		args = append([]string{"-v", "4", "--pool", cmp.Or(n.PoolName, "pool") + "=loop:" + n.PoolDir() + n.PoolOptions}, args...)
	}
	command := slices.Concat(n.Under, []string{n.Bin}, args)
	n.cmd = exec.Command(command[0], command[1:]...)
	n.cmd.Env = append(os.Environ(), n.Env...)
	n.log = &LogBuffer{}
	n.cmd.Stderr = n.log
	if err := n.cmd.Start(); err != nil {
		n.T.Fatal(err)
	}
}

// startTime bounds the wait for a start. It took more than a minute in an emulated guest beside four times as much work as processors.
const startTime = 5 * time.Minute

// Start starts the process and waits until it serves.
func (n *Node) Start() {
	n.T.Helper()
	n.Launch()
	deadline := time.Now().Add(startTime)
	Listens(strings.TrimPrefix(n.Endpoint(), "unix://"), time.Until(deadline))
	var err error
	if n.Client != nil {
		n.Client.Close()
	}
	dial := grpc.WithChainUnaryInterceptor(n.patientWithPools, PatientUnstage, afterStarts)
	if n.Client, err = csiclient.Dial(n.Endpoint(), n.KubeletDir(), dial); err != nil {
		n.T.Fatal(err)
	}
	for ; time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		_, err = n.Client.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		cancel()
		if err == nil {
			n.awaitPools(deadline)
			n.started = n.descriptors()
			return
		}
	}
	n.T.Fatalf("csi-node does not serve: %v\n%s", err, n.Log())
}

// Wait waits for the end of the process and returns its result. One that does not end is killed, so that a test does not hang.
func (n *Node) Wait() error {
	if n.cmd == nil {
		return nil
	}
	late := time.AfterFunc(startTime, func() {
		n.T.Errorf("csi-node has not ended within %s", startTime)
		_ = n.cmd.Process.Kill() // it may end just now
	})
	err := n.cmd.Wait()
	late.Stop()
	n.cmd = nil
	return err
}

// Kill is kill -9.
func (n *Node) Kill() {
	if n.cmd == nil {
		return
	}
	_ = n.cmd.Process.Kill() // it may have ended already
	_ = n.Wait()             // "signal: killed"
}

// Stop is SIGTERM; the process must exit successfully.
func (n *Node) Stop() {
	n.T.Helper()
	if n.cmd == nil {
		return
	}
	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		n.T.Error(err)
	}
	if err := n.Wait(); err != nil {
		n.T.Errorf("csi-node ended with %v\n%s", err, n.Log())
	}
}

// Become stops the process and starts another program in its place, as an upgrade does.
func (n *Node) Become(bin string) {
	n.T.Helper()
	n.checkDescriptors()
	n.Stop()
	n.Bin = bin
	n.Start()
}

// Restart is kill -9 and a new process.
func (n *Node) Restart() {
	n.T.Helper()
	n.Kill()
	n.Start()
}

// descriptors lists the process's open descriptors, without sockets, the Go runtime's own, and user
// namespaces, of which it keeps a limited number.
func (n *Node) descriptors() []string {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", n.PID()))
	var open []string
	for _, fd := range fds {
		name, err := os.Readlink(fd)
		if err != nil || strings.HasPrefix(name, "socket:") || strings.HasPrefix(name, "pipe:") ||
			strings.HasPrefix(name, "anon_inode:[event") ||
			strings.HasPrefix(name, "anon_inode:[pidfd]") || strings.HasPrefix(name, "user:[") {
			continue
		}
		open = append(open, name)
	}
	sort.Strings(open)
	return open
}

// checkDescriptors fails the test if the process has descriptors that it did not have after its start: a descriptor on a mount would
// keep its file system in use. One that it had then may be gone: another call was being answered.
func (n *Node) checkDescriptors() {
	if n.cmd == nil || n.started == nil {
		return
	}
	var now, more []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		now = n.descriptors()
		if more = added(n.started, now); len(more) == 0 {
			return
		}
	}
	n.T.Errorf("csi-node leaks descriptors:\n%s\nafter its start it had\n%s\nand at the end\n%s", strings.Join(more, "\n"),
		strings.Join(n.started, "\n"), strings.Join(now, "\n"))
}

// added returns what the second list has more often than the first.
func added(before, after []string) (more []string) {
	left := map[string]int{}
	for _, name := range before {
		left[name]++
	}
	for _, name := range after {
		if left[name]--; left[name] < 0 {
			more = append(more, name)
		}
	}
	return more
}

func (n *Node) cleanUp() {
	n.checkDescriptors()
	if n.T.Failed() && n.log != nil {
		n.T.Logf("csi-node said:\n%s", n.Log())
	}
	n.Stop()
	if n.Client != nil {
		if err := n.Client.Close(); err != nil {
			n.T.Error(err)
		}
	}
	// A failed test leaves mounts; the next one must not see them.
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	lines := strings.Split(string(mounts), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if f := strings.Fields(lines[i]); len(f) > 4 && strings.HasPrefix(f[4], n.Dir+"/") {
			n.T.Errorf("left mounted: %s", f[4])
			_ = syscall.Unmount(f[4], syscall.MNT_DETACH)
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		if b, _ := os.ReadFile(l); strings.HasPrefix(string(b), n.Dir+"/") {
			n.T.Errorf("left bound: %s %s", l, b)
			for _, on := range loops { // the holds of raw block devices
				if o, _ := os.ReadFile(on); strings.TrimSpace(string(o)) == "/dev/"+strings.Split(l, "/")[3] {
					_ = unbind(strings.Split(on, "/")[3]) // already reported
				}
			}
			_ = unbind(strings.Split(l, "/")[3])
		}
	}
}
