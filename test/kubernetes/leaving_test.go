//go:build kubernetes && fleet

package kubernetes_test

import (
	"strings"
	"testing"
	"time"
)

// 11.2: a node leaves the cluster with its disks and returns under its name: its claims have their
// data. Then it is removed for good, with the steps of docs/nodes.md: what is needed moves to
// another node, and nothing of it is left.
func TestFleet_ANodeLeavesAsPlanned(t *testing.T) {
	s := use(t)
	const node = "node-3"
	s.claim("data", "crust-xfs", "320Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, away(node))
	s.run("p", "mkdir /data/d && echo kept >/data/d/f; sync")
	s.snapshot("snap", "data")
	s.delete("p")
	leave := func() {
		t.Helper()
		s.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
	}
	leave()
	if out, nothing := s.drainCheck(node); !nothing {
		t.Errorf("a drained node: %s", out)
	}
	s.kubectl("delete", "node", node)
	machine(t, "halt", node)
	machine(t, "start", node)
	s.back(node)
	s.pod("q", []string{"data:/data"}, away(node))
	if got := s.run("q", "cat /data/d/f"); got != "kept" {
		t.Errorf("after its return: %q", got)
	}
	s.delete("q")

	// For good. Steps 1 and 2.
	s.kubectl("cordon", node)
	out, nothing := s.drainCheck(node, "--remove")
	if nothing || !strings.Contains(out, s.ns+"/data") || !strings.Contains(out, "snapshot") {
		t.Errorf("what is only on this node: %s", out)
	}
	// Step 3.
	s.apply(podText("old", []string{"data:/data:ro"}, "tolerations: [{key: "+fleet+
		", operator: Exists}, {key: node.kubernetes.io/unschedulable, operator: Exists, effect: NoSchedule}]"))
	s.claim("new", "crust-xfs", "320Mi", "ReadWriteOncePod")
	s.pod("new", []string{"new:/data"}, away("node-2"))
	s.ready("old")
	if out, err := onNodeIn("/", "kubectl exec -n "+s.ns+" old -- tar c -C /data . | kubectl exec -n "+s.ns+
		" -i new -- tar x -C /data"); err != nil {
		t.Fatal(out, err)
	}
	if got := s.run("new", "cat /data/d/f"); got != "kept" {
		t.Errorf("on the other node: %q", got)
	}
	// Steps 4 and 6.
	s.delete("old")
	s.kubectl("delete", "volumesnapshot", "snap", "-n", s.ns, "--timeout=90s")
	s.kubectl("delete", "pvc", "data", "-n", s.ns, "--timeout=90s")
	leave()
	s.until(time.Minute, "nothing is only on this node", func() (string, bool) { return s.drainCheck(node, "--remove") })
	s.kubectl("delete", "node", node)
	machine(t, "remove", node)
	// Step 7.
	s.forget(node)
	if got := s.kubectl("get", "pv,volumesnapshotcontents", "-o", "yaml"); strings.Contains(got, node) {
		t.Errorf("left of it: %s", got)
	}
	if got := s.run("new", "cat /data/d/f"); got != "kept" {
		t.Errorf("after its end: %q", got)
	}
	machine(t, "start", node)
	s.back(node)
}

// 11.2: a node gets a new root disk and keeps its pool's disk. Under the same name its claims have their data again, the cluster's
// PersistentVolumes match the pool, and its volumes grow, are copied and deleted.
func TestFleet_ANodeIsInstalledAnew(t *testing.T) {
	s := use(t)
	const node = "node-3"
	s.claim("data", "crust-xfs", "320Mi", "ReadWriteOncePod")
	s.claim("raw", "crust-ext4", "64Mi", "ReadWriteOncePod", "volumeMode: Block")
	s.pod("p", []string{"data:/data", "raw:/dev/x"}, away(node))
	s.run("p", "echo kept >/data/f; echo raw | dd of=/dev/x conv=fsync 2>/dev/null; sync")
	s.snapshot("snap", "data")
	s.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
	machine(t, "halt", node)
	s.kubectl("delete", "node", node)
	machine(t, "reinstall", node)
	machine(t, "start", node)
	s.back(node)
	if out, err := onNodeIn("/", "kubectl get pv -o json | kubectl exec -i -n "+system+" "+s.daemon("csi-node", node)+
		" -c csi-node -- crustctl pool check --persistent-volumes -"); err != nil {
		t.Errorf("the pool against the cluster: %v\n%s", err, out)
	}
	s.pod("q", []string{"data:/data", "raw:/dev/x"}, away(node))
	if got := s.run("q", "cat /data/f; head -c 3 /dev/x"); got != "kept\nraw" {
		t.Errorf("after its return: %q", got)
	}
	s.kubectl("patch", "pvc", "data", "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}`)
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=640Mi", "pvc/data", "--timeout=90s")
	s.claim("copy", "crust-xfs", "320Mi", "ReadWriteOnce",
		"dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}")
	s.pod("c", []string{"copy:/data"}, anywhere)
	if got := s.run("c", "cat /data/f"); got != "kept" || s.nodeOf("c") != node {
		t.Errorf("of the snapshot: %q on %s", got, s.nodeOf("c"))
	}
}
