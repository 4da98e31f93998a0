package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// contents returns the files below a directory, except lock files, with their contents and times of
// change.
func contents(t testing.TB, dir string) string {
	t.Helper()
	var all strings.Builder
	ok(t, filepath.Walk(dir, func(path string, st os.FileInfo, err error) error {
		if err != nil || !st.Mode().IsRegular() || st.Name() == "lock" {
			return err
		}
		all.WriteString(path + " " + st.ModTime().String() + "\n" + read(t, path) + "\n")
		return nil
	}))
	return all.String()
}

// ended runs a program that must refuse to start, and returns its output.
func ended(t testing.TB, bin string, args ...string) string {
	t.Helper()
	said := filepath.Join(t.TempDir(), "said")
	out, err := os.Create(said)
	ok(t, err)
	defer out.Close()
	cmd := exec.Command(bin, args...)
	cmd.Stdout, cmd.Stderr = out, out
	ok(t, cmd.Start())
	result := make(chan error, 1)
	go func() { result <- cmd.Wait() }()
	select {
	case err := <-result:
		if err == nil {
			t.Errorf("it ended with status 0: %s", read(t, said))
		}
	case <-time.After(time.Minute):
		ok(t, cmd.Process.Kill())
		<-result
		t.Errorf("it started beside the other:\n%s", read(t, said))
	}
	return read(t, said)
}

func TestA11_ASecondNodeOnAStateDirectoryDoesNotStart(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", csiclient.Volume{FSType: "ext4"})
	state := filepath.Join(n.Dir, "state")
	// What a start removes if it is stale: a helper's directory for short mounts.
	ok(t, os.MkdirAll(filepath.Join(state, "scratch", "0123"), 0o700))
	before := contents(t, state)
	said := ended(t, testnode.Build(t, ""), "--endpoint", "unix://"+filepath.Join(n.Dir, "second.sock"), "--node-id", "node-1",
		"--pool", "other=loop:"+filepath.Join(n.Dir, "other"), "--state-dir", state, "--kubelet-dir", n.KubeletDir(), "--idmap-probe=false")
	for _, want := range []string{"--state-dir", state, "csi-node, process " + itoa(n.PID())} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not say %q:\n%s", want, said)
		}
	}
	if after := contents(t, state); after != before {
		t.Errorf("the first one's records were\n%s\nand are\n%s", before, after)
	}
	for _, gone := range []string{"scratch/0123"} {
		if _, err := os.Stat(filepath.Join(state, gone)); err != nil {
			t.Errorf("the first one's %s: %v", gone, err)
		}
	}
	if _, err := os.Stat(filepath.Join(n.Dir, "other")); err == nil {
		t.Error("it made its pool's directory before it looked who is there")
	}
	write(t, target+"/f", "the first goes on")
	n.Restart() // a kill releases the directory
	down(t, n, v.ID, target)
}

func TestA11_ASecondAgentOnAStateDirectoryDoesNotStart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	config := filepath.Join(dir, "kubeconfig")
	write(t, config, `{"kind": "Config", "apiVersion": "v1", "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`)
	bin := testnode.BuildCommand(t, "crust-agent", "")
	args := func(name string) []string {
		return []string{"--driver", "unix://" + filepath.Join(dir, "no-driver.sock"),
			"--endpoint", "unix://" + filepath.Join(dir, name+".sock"),
			"--kubelet-registration-dir", dir, "--nri-socket", filepath.Join(dir, "no-nri.sock"), "--node-name", "n",
			"--kubeconfig", config, "--state-dir", filepath.Join(dir, "state")}
	}
	first := exec.Command(bin, args("first")...)
	ok(t, first.Start())
	t.Cleanup(func() { first.Process.Kill(); first.Wait() })
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if st, err := os.Stat(filepath.Join(dir, "state", "deferrals")); err == nil && st.IsDir() {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the first agent does not start")
		}
	}
	said := ended(t, bin, args("second")...)
	if !strings.Contains(said, "crust-agent, process "+itoa(first.Process.Pid)) {
		t.Errorf("it does not say who has it:\n%s", said)
	}
}
