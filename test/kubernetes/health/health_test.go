//go:build kubernetes

// Package health_test tests what a kubelet does with the driver's health. Kubernetes 1.37 is the
// first whose kubelet calls NodeGetVolumeHealth and NodeGetStorageHealth, with the feature gate
// CSIVolumeHealth (pkg/kubelet/volumemanager/volumehealth/manager.go there). So this runs on its
// own node of that version: "make test-kubernetes-health".
package health_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const project = "../../.."

// TestMain starts a node of the next Kubernetes, and stops it unless CRUST_KUBERNETES_KEEP is set.
func TestMain(m *testing.M) {
	code := 1
	if err := install(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	if os.Getenv("CRUST_KUBERNETES_KEEP") == "" {
		if out, err := cluster(2*time.Minute, "", "down"); err != nil {
			fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
			code = 1
		}
	}
	os.Exit(code)
}

func install() error {
	root, err := filepath.Abs(project)
	if err != nil {
		return err
	}
	for k, v := range map[string]string{"CRUST_KUBERNETES_STATE": root + "/.cache/kubernetes/health",
		"CRUST_KUBERNETES_BIN": root + "/.cache/kubernetes/next", "CRUST_KUBERNETES_GATES": "CSIVolumeHealth=true",
		"CRUST_KUBERNETES_NODES": "1"} {
		if err := os.Setenv(k, v); err != nil {
			return err
		}
	}
	for _, argv := range [][]string{
		{"up"},
		{"exec", "kubectl", "apply", "-k", root + "/.cache/kubernetes/bin/crd"},
		{"exec", "kubectl", "wait", "--for=condition=Established", "crd/volumesnapshotclasses.snapshot.storage.k8s.io", "--timeout=60s"},
		{"exec", "kubectl", "apply", "-k", root + "/deploy/kubernetes/base"},
		{"exec", "kubectl", "-n", "crust-csi", "rollout", "status", "daemonset/csi-node", "--timeout=240s"},
		{"exec", "kubectl", "-n", "crust-csi", "rollout", "status", "daemonset/csi-sidecars", "--timeout=240s"},
	} {
		if out, err := cluster(10*time.Minute, "", argv...); err != nil {
			return fmt.Errorf("%s: %w\n%s", argv, err, out)
		}
	}
	return nil
}

// cluster runs cluster.sh.
func cluster(most time.Duration, stdin string, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	c := exec.CommandContext(ctx, "../cluster.sh", argv...)
	c.Stdin = strings.NewReader(stdin)
	var out, words bytes.Buffer
	c.Stdout, c.Stderr = &out, &words
	c.WaitDelay = time.Second
	if err := c.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, words.String())
	}
	return strings.TrimSpace(out.String()), nil
}

// on runs a shell script on the node.
func on(t testing.TB, script string) string {
	t.Helper()
	out, err := cluster(2*time.Minute, "", "exec", "bash", "-euc", script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// until waits for a condition on a script's output.
func until(t testing.TB, what, script string, is func(string) bool) {
	t.Helper()
	begin, got := time.Now(), ""
	for ; time.Since(begin) < 3*time.Minute; time.Sleep(time.Second) {
		if got = on(t, script); is(got) {
			t.Logf("%s, after %s: %s", what, time.Since(begin).Round(time.Second), got)
			return
		}
	}
	t.Fatalf("not: %s; seen: %s", what, got)
}

func has(words ...string) func(string) bool {
	return func(s string) bool {
		for _, w := range words {
			if !strings.Contains(s, w) {
				return false
			}
		}
		return true
	}
}

func lacks(word string) func(string) bool {
	return func(s string) bool { return !strings.Contains(s, word) }
}

// 11.5: the status of a pod shows a sick volume with the driver's message, and can still be
// written. It does not show a healthy one.
func TestHealth_AKubeletShowsASickVolume(t *testing.T) {
	if _, err := cluster(time.Minute,
		`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data}, spec: {storageClassName: crust-ext4,
accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {terminationGracePeriodSeconds: 1, containers: [{name: c, image: "localhost/test/busybox:1",
volumeMounts: [{name: mine, mountPath: /data}]}], volumes: [{name: mine, persistentVolumeClaim: {claimName: data}}]}}`,
		"exec", "kubectl", "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		on(t, "kubectl delete pod/p --grace-period=1 --timeout=90s; kubectl delete pvc/data --timeout=90s")
		until(t, "the volume is deleted", "kubectl get pv -o name", func(s string) bool { return s == "" })
	})
	on(t, "kubectl wait --for=condition=Ready pod/p --timeout=110s")
	const status = "kubectl get pod p -o 'jsonpath={.status.volumeHealth}'"
	if got := on(t, status); strings.Contains(got, "ealthConditions\":[{") {
		t.Errorf("a volume that is well: %s", got)
	}
	on(t, `
		dev=$(awk '/kubernetes.io~csi.pvc-/ && / - ext4 / {print $3}' /proc/1/mountinfo | head -1)
		echo 1 >/sys/fs/ext4/$(basename $(readlink /sys/dev/block/$dev))/trigger_fs_error`)
	until(t, "the pod's status has it", status, has(`"name":"mine"`, `"reason":"`, "ext4"))
	// It does not delay other changes of the pod's status.
	on(t, `ctr -n k8s.io tasks kill -s KILL $(ctr -n k8s.io containers ls -q 'labels."io.kubernetes.pod.name"==p,labels."io.cri-containerd.kind"==container')`)
	until(t, "the status of the pod goes on", "kubectl get pod p -o 'jsonpath={.status.containerStatuses[0].restartCount}'", has("1"))
}

// 11.5: the node's CSINode and the kubelet's metrics show a pool that is nearly full, until it has
// room again.
func TestHealth_AKubeletShowsASickPool(t *testing.T) {
	const status = "kubectl get csinode node -o 'jsonpath={.status.storageHealth}'"
	const metric = "kubectl get --raw /api/v1/nodes/node/proxy/metrics | grep '^csi_node_storage_health_status' || true"
	if got := on(t, status); strings.Contains(got, "reason") {
		t.Errorf("pools that are well: %s", got)
	}
	const filler = "/var/lib/crust-csi/filler"
	t.Cleanup(func() { on(t, "rm -f "+filler) })
	on(t, `fallocate -l $(( $(stat -f -c '(%a - %b / 40) * %S' /var/lib/crust-csi) )) `+filler)
	until(t, "the CSINode has it", status,
		has(`"name":"csi.crust.dev"`, `"reason":"PoolNearlyFull"`, `"status":"StorageDegraded"`, "pool default "))
	until(t, "the kubelet's metrics have it", metric, has(`driver_name="csi.crust.dev"`, `reason="PoolNearlyFull"`, "} 1"))
	on(t, "rm "+filler)
	until(t, "the CSINode has it no more", status, lacks("PoolNearlyFull"))
	until(t, "the kubelet's metrics have it no more", metric, lacks("PoolNearlyFull"))
}
