//go:build kubernetes

package kubernetes_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// machine starts and stops nodes with cluster.sh.
func machine(t testing.TB, argv ...string) {
	t.Helper()
	if err := cluster(argv...); err != nil {
		t.Fatal(err)
	}
}

// back waits until a restarted node takes pods of these tests, and no others.
func (s *space) back(node string) {
	s.t.Helper()
	s.kubectl("taint", "--overwrite", "node", node, fleet+"=:NoSchedule")
	for _, set := range []string{"csi-node", "csi-sidecars", "crust", "crust-agent"} {
		s.kubectl("rollout", "status", "-n", system, "daemonset/"+set, "--timeout=120s")
	}
	s.until(90*time.Second, "the driver is there", func() (string, bool) {
		got := s.kubectl("get", "csinode", node, "-o", "jsonpath={.spec.drivers[*].name}")
		return got, strings.Contains(got, driver)
	})
}

// 11.2: a node's processes end all at once. Its pods run again there, with their data. Those of
// other nodes never stop.
func TestFleet_ANodeIsReset(t *testing.T) {
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.claim("raw", "crust-ext4", "64Mi", "ReadWriteOncePod", "volumeMode: Block")
	s.claim("sandbox", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.claim("other", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data", "raw:/dev/x"}, away("node-2"))
	s.pod("q", []string{"sandbox:/data"}, sandboxed, away("node-2"))
	s.pod("elsewhere", []string{"other:/data"}, away("node-3"))
	s.run("p", "echo fs >/data/f; echo raw | dd of=/dev/x conv=fsync 2>/dev/null; sync")
	s.run("q", "echo sandbox >/data/f; sync")
	s.run("elsewhere", "(while sleep 0.2; do echo x >>/data/ticks; done) >/dev/null 2>&1 &")
	machine(t, "reboot", "node-2")
	s.back("node-2")
	s.until(120*time.Second, "both pods run again", func() (string, bool) {
		got := s.kubectl("get", "pods", "-n", s.ns,
			"-o", `jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].ready} {.status.containerStatuses[0].restartCount}{"\n"}{end}`)
		return got, strings.Contains(got, "p true 1") && strings.Contains(got, "q true 1") && strings.Contains(got, "elsewhere true 0")
	})
	if got := s.run("p", "cat /data/f; head -c 3 /dev/x"); got != "fs\nraw" {
		t.Errorf("p reads %q", got)
	}
	if got := s.run("q", "cat /data/f"); got != "sandbox" {
		t.Errorf("q reads %q", got)
	}
	if got := s.run("elsewhere",
		"a=$(wc -l </data/ticks); sleep 1; b=$(wc -l </data/ticks); [ $b -gt $a ] && echo writes"); got != "writes" {
		t.Errorf("the pod of the other node: %q", got)
	}
}

// 11.2: a node is drained. Its pods wait for it and say so, and run there again when it is back.
func TestFleet_ANodeIsDrained(t *testing.T) {
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.apply(`{apiVersion: apps/v1, kind: Deployment, metadata: {name: app}, spec: {replicas: 1, strategy: {type: Recreate}, selector: {matchLabels: {app: away}},
template: {metadata: {labels: {app: away}}, spec: {terminationGracePeriodSeconds: 1, tolerations: [{key: ` + fleet + `, operator: Exists}],
nodeSelector: {topology.csi.crust.dev/node: node-3}, containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [{name: v, mountPath: /data}]}],
volumes: [{name: v, persistentVolumeClaim: {claimName: data}}]}}}}`)
	t.Cleanup(func() { s.kubectl("delete", "deployment", "app", "-n", s.ns, "--timeout=60s") })
	up := func() string {
		t.Helper()
		s.kubectl("rollout", "status", "-n", s.ns, "deployment/app", "--timeout=90s")
		return s.get("pods", ".items[0].metadata.name")
	}
	s.run(up(), "echo kept >/data/f; sync")
	// The pod may run elsewhere, but its claim may not.
	s.kubectl("patch", "deployment", "app", "-n", s.ns, "--type=json", "-p", `[{"op":"remove","path":"/spec/template/spec/nodeSelector"}]`)
	up()
	t.Cleanup(func() { s.kubectl("uncordon", "node-3") })
	s.kubectl("drain", "node-3", "--pod-selector=app=away", "--ignore-daemonsets", "--timeout=60s")
	pod := ""
	s.until(60*time.Second, "the pod that waits", func() (string, bool) {
		pod = s.kubectl("get", "pods", "-n", s.ns, "-l", "app=away", "--field-selector=status.phase=Pending", "-o",
			"jsonpath={.items[*].metadata.name}")
		return pod, pod != ""
	})
	s.said("Pod/"+pod, "FailedScheduling: .*(unschedulable|affinity)")
	s.until(60*time.Second, "the volume is unmounted", func() (string, bool) {
		got := onThe(t, "node-3", "grep kubernetes.io~csi/"+s.get("pvc/data", ".spec.volumeName")+" /proc/1/mountinfo || true")
		return got, got == ""
	})
	s.kubectl("uncordon", "node-3")
	if got := s.run(up(), "cat /data/f"); got != "kept" {
		t.Errorf("%q", got)
	}
}

// drainCheck runs `crustctl node drain-check` in a node's csi-node. It returns the report, and
// whether the check found nothing.
func (s *space) drainCheck(node string, args ...string) (report string, nothing bool) {
	s.t.Helper()
	out, err := s.try(append([]string{"exec", "-n", system, s.daemon("csi-node", node), "-c", "csi-node", "--", "crustctl", "node",
		"drain-check"}, args...)...)
	if err != nil && !strings.Contains(err.Error(), "exit code 1") {
		s.t.Fatal(err)
	}
	return out, err == nil
}

// replaced replaces a claim's PersistentVolume by one with the affinity of another node:
// docs/nodes.md.
func (s *space) replaced(claim, node string) {
	s.t.Helper()
	name := s.get("pvc/"+claim, ".spec.volumeName")
	s.kubectl("patch", "pv", name, "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
	var pv map[string]any
	if err := json.Unmarshal([]byte(s.kubectl("get", "pv", name, "-o", "json")), &pv); err != nil {
		s.t.Fatal(err)
	}
	delete(pv, "status")
	for _, field := range []string{"uid", "resourceVersion", "creationTimestamp"} {
		delete(pv["metadata"].(map[string]any), field)
	}
	terms := pv["spec"].(map[string]any)["nodeAffinity"].(map[string]any)["required"].(map[string]any)["nodeSelectorTerms"].([]any)
	terms[0].(map[string]any)["matchExpressions"].([]any)[0].(map[string]any)["values"] = []string{node}
	text, err := json.Marshal(pv)
	if err != nil {
		s.t.Fatal(err)
	}
	s.kubectl("delete", "pv", name, "--wait=false")
	s.kubectl("patch", "pv", name, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	s.until(30*time.Second, "the old one is gone", func() (string, bool) {
		out, err := s.try("get", "pv", name)
		return out, err != nil
	})
	s.apply(string(text))
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.phase}=Bound", "pvc/"+claim, "--timeout=60s")
	s.kubectl("patch", "pv", name, "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
}

// forget deletes the capacities of a node that is no longer there: docs/nodes.md.
func (s *space) forget(node string) {
	s.t.Helper()
	capacities := func() string {
		return s.kubectl("get", "csistoragecapacities", "-n", system, "-o",
			`jsonpath={range .items[?(@.nodeTopology.matchLabels.topology\.csi\.crust\.dev/node=='`+node+`')]}{.metadata.name} {end}`)
	}
	for _, name := range strings.Fields(capacities()) {
		s.kubectl("delete", "csistoragecapacity", name, "-n", system)
	}
	if left := capacities(); left != "" {
		s.t.Errorf("capacities of %s: %s", node, left)
	}
}

// 11.2: a node returns under another name, with its disks. The steps of docs/nodes.md give its
// claims their volumes back, which can then be deleted there like any other.
func TestFleet_ANodeComesBackUnderAnotherName(t *testing.T) {
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, away("node-3"))
	s.run("p", "echo kept >/data/f; sync")
	s.snapshot("snap", "data")
	content := s.get("volumesnapshot/snap", ".status.boundVolumeSnapshotContentName")
	s.delete("p")
	rename := func(from, to string) {
		machine(t, "halt", from)
		s.kubectl("delete", "node", from)
		machine(t, "rename", from, to)
		machine(t, "start", to)
		s.back(to)
	}
	rename("node-3", "node-4")
	t.Cleanup(func() { rename("node-4", "node-3") })
	s.apply(podText("q", []string{"data:/data"}, away("node", "node-2", "node-4")))
	s.said("Pod/q", "FailedScheduling: .*affinity")
	s.delete("q")
	s.replaced("data", "node-4")
	s.pod("r", []string{"data:/data"}, away("node", "node-2", "node-4"))
	if got := s.run("r", "cat /data/f"); got != "kept" || s.nodeOf("r") != "node-4" {
		t.Errorf("%q on %s", got, s.nodeOf("r"))
	}
	s.delete("r")
	// Its snapshots follow by their label.
	s.kubectl("label", "--overwrite", "volumesnapshotcontent", content, "snapshot.storage.kubernetes.io/managed-by=node-4")
	s.claim("copy", "crust-ext4", "64Mi", "ReadWriteOnce",
		"dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}")
	s.pod("c", []string{"copy:/data"}, away("node", "node-2", "node-4"))
	if got := s.run("c", "cat /data/f"); got != "kept" || s.nodeOf("c") != "node-4" {
		t.Errorf("of the snapshot: %q on %s", got, s.nodeOf("c"))
	}
	s.delete("c")
	s.kubectl("delete", "volumesnapshot", "snap", "-n", s.ns, "--timeout=90s")
	s.forget("node-3")
	s.kubectl("delete", "pvc", "data", "copy", "-n", s.ns, "--timeout=90s")
	// The node's own provisioner removes the PersistentVolumes after the files, and the node gets its old name back after this.
	s.until(90*time.Second, "volumes and snapshot are deleted", func() (string, bool) {
		got := onThe(t, "node-4", "find /var/lib/crust-csi/pool/volumes /var/lib/crust-csi/pool/snapshots -type f") + s.volumes()
		return got, got == ""
	})
}

// 11.2: a node is gone for good. The steps of docs/nodes.md remove its claims and snapshots, and
// the cluster continues. A new node of that name starts empty.
func TestFleet_ANodeIsGoneForGood(t *testing.T) {
	s := use(t)
	s.claim("lost", "crust-xfs", "320Mi", "ReadWriteOncePod")
	s.pod("p", []string{"lost:/data"}, away("node-3"))
	s.run("p", "echo lost >/data/f; sync")
	s.snapshot("snap", "lost")
	pv := s.get("pvc/lost", ".spec.volumeName")
	content := s.get("volumesnapshot/snap", ".status.boundVolumeSnapshotContentName")
	machine(t, "remove", "node-3")
	s.kubectl("delete", "node", "node-3")
	// A copy of its data cannot be made, and the claim says so.
	s.claim("copy", "crust-xfs", "320Mi", "ReadWriteOnce",
		"dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}")
	s.said("PersistentVolumeClaim/copy", "OriginAway: snapshot snap is on node node-3")
	s.kubectl("delete", "pod", "p", "-n", s.ns, "--grace-period=0", "--force", "--ignore-not-found")
	s.kubectl("delete", "pvc", "lost", "copy", "-n", s.ns, "--timeout=60s")
	s.kubectl("delete", "pv", pv, "--wait=false")
	s.kubectl("patch", "pv", pv, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	s.kubectl("delete", "volumesnapshot", "snap", "-n", s.ns, "--wait=false")
	s.kubectl("delete", "volumesnapshotcontent", content, "--wait=false", "--ignore-not-found")
	for _, o := range []string{"volumesnapshotcontent/" + content, "-n " + s.ns + " volumesnapshot/snap"} {
		f := strings.Fields(o)
		s.try(append(append([]string{"patch"}, f...), "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)...) // it may be gone by now
	}
	s.until(60*time.Second, "nothing of it is left", func() (string, bool) {
		got := s.kubectl("get", "pv,volumesnapshotcontent", "-o", "name")
		return got, !strings.Contains(got, pv) && !strings.Contains(got, content)
	})
	machine(t, "start", "node-3")
	s.back("node-3")
	s.claim("new", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.pod("q", []string{"new:/data"}, away("node-3"))
	if got := s.run("q", "echo new >/data/f && cat /data/f"); got != "new" {
		t.Errorf("%q", got)
	}
	if got := s.kubectl("get", "csistoragecapacities", "-n", system,
		"-o", `jsonpath={range .items[?(@.nodeTopology.matchLabels.topology\.csi\.crust\.dev/node=='node-3')]}{.storageClassName} {end}`); strings.Count(got, "crust-ext4") != 1 {
		t.Errorf("capacities of the new node: %s", got)
	}
}
