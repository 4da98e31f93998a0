//go:build kubernetes

package kubernetes_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestMain starts the cluster, and stops it unless CRUST_KUBERNETES_KEEP is set.
func TestMain(m *testing.M) {
	code := 1
	if err := restrict(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(code)
	}
	if err := install(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
		left, err := leftovers()
		// crust-agent forgets after a while what ended without it.
		for end := time.Now().Add(wait(90 * time.Second)); left != "" && err == nil && time.Now().Before(end); {
			time.Sleep(3 * time.Second)
			left, err = leftovers()
		}
		if left != "" || err != nil {
			fmt.Fprintf(os.Stderr, "left on the node: %s %v\n", left, err)
			code = 1
		}
	}
	if os.Getenv("CRUST_KUBERNETES_KEEP") == "" {
		if err := cluster("down"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// leftovers returns what the tests' volumes have left on the nodes.
func leftovers() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait(time.Minute))
	defer cancel()
	all := ""
	for _, node := range names() {
		left, err := on(ctx, node, "", "bash", "-c", `
			losetup -n -O NAME,BACK-FILE | grep -F crust-csi || true
			awk '$5 !~ "^/old/" && /kubernetes.io~csi|crust-deferred/' /proc/1/mountinfo # the machine's own are in /old
			find /var/lib/crust-csi/pool/volumes /var/lib/crust-csi/pool/snapshots /var/lib/crust/ns /var/lib/crust/sandboxes /var/lib/crust-agent/deferrals -type f 2>/dev/null || true`)
		if left != "" || err != nil {
			all += fmt.Sprintf("\n%s: %s %v", node, left, err)
		}
	}
	return all, nil
}

func install() error {
	project, err := filepath.Abs("../..")
	if err != nil {
		return err
	}
	if err := os.Setenv("CRUST_KUBERNETES_NODES", strconv.Itoa(nodes)); err != nil {
		return err
	}
	if err := cluster("up"); err != nil {
		return err
	}
	var steps [][]string
	if others := names()[1:]; len(others) > 0 {
		// Only pods that a test sends there (away) run on the other nodes.
		steps = append(steps, slices.Concat([]string{"kubectl", "taint", "--overwrite", "node"}, others,
			[]string{fleet + "=:NoSchedule"}))
	}
	for _, argv := range append(steps, [][]string{
		{"kubectl", "apply", "-k", project + "/.cache/kubernetes/bin/crd"},
		{"kubectl", "wait", "--for=condition=Established", "crd/volumesnapshotclasses.snapshot.storage.k8s.io",
			"--timeout=30s"},
		{"kubectl", "apply", "-k", project + "/test/kubernetes/overlay"},
		{"kubectl", "-n", system, "rollout", "status", "daemonset/csi-node", "--timeout=90s"},
		{"kubectl", "-n", system, "rollout", "status", "daemonset/csi-sidecars", "--timeout=90s"},
		{"kubectl", "-n", system, "rollout", "status", "deployment/csi-resizer", "--timeout=90s"},
		{"kubectl", "-n", system, "rollout", "status", "deployment/csi-steward", "--timeout=90s"},
		{"kubectl", "-n", system, "rollout", "status", "daemonset/crust", "--timeout=90s"},
		{"kubectl", "-n", system, "rollout", "status", "daemonset/crust-agent", "--timeout=90s"},
	}...) {
		ctx, cancel := context.WithTimeout(context.Background(), wait(7*time.Minute))
		_, err := try(ctx, "", argv...)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// cluster runs cluster.sh. If it takes too long, its error shows the processes that it waits for.
func cluster(argv ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), wait(7*time.Minute))
	defer cancel()
	var processes []byte
	c := exec.CommandContext(ctx, "./cluster.sh", patient(argv)...)
	c.Cancel = func() error {
		processes, _ = exec.Command("ps", "-eo", "pid,ppid,stat,wchan:20,etime,args", "--forest").CombinedOutput()
		return c.Process.Kill()
	}
	c.WaitDelay = time.Second
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("cluster.sh %s: %w\n%s\n%s", strings.Join(argv, " "), err, out, processes)
	}
	return nil
}
