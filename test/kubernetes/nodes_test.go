//go:build kubernetes

package kubernetes_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// fleet is a taint: it keeps pods that do not tolerate it on the first node.
const fleet = "crust.test/fleet"

// away returns fields of a pod's spec that send it to one of these nodes.
func away(nodes ...string) string {
	return fmt.Sprintf(`tolerations: [{key: %s, operator: Exists}], affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution:
{nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%s]}]}]}}}`, fleet, strings.Join(nodes, ", "))
}

// daemon returns the pod of a DaemonSet on a node, as kubectl names it.
func (s *space) daemon(set, node string) string {
	s.t.Helper()
	label := map[string]string{"csi-node": "crust-csi", "csi-sidecars": "crust-csi-sidecars", "crust": "crust",
		"crust-agent": "crust-agent"}[set]
	got := s.kubectl("get", "pods", "-n", system, "-l", "app.kubernetes.io/name="+label,
		"--field-selector=spec.nodeName="+node, "-o", "name")
	if got == "" || strings.Contains(got, "\n") {
		s.t.Fatalf("pods of %s on %s: %q", set, node, got)
	}
	return got
}

// onThe runs a shell script on a node.
func onThe(t testing.TB, node, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait(time.Minute))
	defer cancel()
	out, err := on(ctx, node, "", "bash", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// nodeOf returns a pod's node.
func (s *space) nodeOf(pod string) string {
	s.t.Helper()
	return s.get("pod/"+pod, ".spec.nodeName")
}

// metric returns the sum of one csi-node metric on the first node.
func metric(t testing.TB, name string) float64 {
	t.Helper()
	return metricOf(t, "node", name)
}

func metricOf(t testing.TB, node, name string) float64 {
	t.Helper()
	s := &space{t: t, ns: system}
	ip := s.get(s.daemon("csi-node", node), ".status.podIP")
	var sum float64
	for line := range strings.Lines(onNode(t, "wget -qO- http://"+ip+":9808/metrics")) {
		if strings.HasPrefix(line, name) {
			f := strings.Fields(line)
			n, err := strconv.ParseFloat(f[len(f)-1], 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
	}
	return sum
}

// anywhere lets a pod run on any node of the cluster.
var anywhere = away("node", "node-2", "node-3")

// 11.2: claims grow on every node: with a file system and raw, while a pod has them, while none
// has, and in a pod's sandbox.
func TestFleet_ClaimsGrowOnEveryNode(t *testing.T) {
	t.Parallel()
	// xfs grows in use in a sandbox without CAP_SYS_RESOURCE.
	class := &space{t: t, ns: "default"}
	const deferred = "fleet-deferred-xfs"
	class.apply(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: ` + deferred + `}, provisioner: csi.crust.dev,
volumeBindingMode: WaitForFirstConsumer, allowVolumeExpansion: true,
parameters: {csi.storage.k8s.io/fstype: xfs, allowRuntimeAssistedMount: "true"}}`)
	t.Cleanup(func() { class.kubectl("delete", "storageclass", deferred) })
	for _, node := range []string{"node", "node-2", "node-3"} {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			s := use(t)
			s.claim("fs", "crust-xfs", "320Mi", "ReadWriteOnce")
			s.claim("raw", "crust-ext4", "64Mi", "ReadWriteOnce", "volumeMode: Block")
			s.claim("idle", "crust-xfs", "320Mi", "ReadWriteOnce")
			s.claim("sandbox", deferred, "320Mi", "ReadWriteOncePod")
			s.pod("p", []string{"fs:/data", "raw:/dev/x"}, away(node))
			s.pod("q", []string{"idle:/data"}, away(node))
			s.pod("r", []string{"sandbox:/data"}, sandboxed, away(node))
			s.said("Pod/r", `MountedInSandbox: volume pvc-.* \(xfs\)`)
			s.delete("q")
			for claim, size := range map[string]string{"fs": "640Mi", "raw": "128Mi", "idle": "640Mi", "sandbox": "640Mi"} {
				s.kubectl("patch", "pvc", claim, "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
			}
			s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=640Mi", "pvc/fs", "--timeout=90s")
			s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=128Mi", "pvc/raw", "--timeout=90s")
			if got := s.run("p",
				"df -k /data | tail -1 | awk '{print ($2 > 500*1024)}'; blockdev --getsize64 /dev/x"); got != fmt.Sprintf("1\n%d",
				128<<20) {
				t.Errorf("%s", got)
			}
			// Otherwise its pod may be there before the claim grows.
			s.kubectl("wait", "--for=jsonpath={.spec.capacity.storage}=640Mi", "pv/"+s.get("pvc/idle", ".spec.volumeName"), "--timeout=90s")
			s.pod("q2", []string{"idle:/data"}, anywhere)
			if got := s.nodeOf("q2"); got != node {
				t.Errorf("the volume of %s has its pod on %s", node, got)
			}
			if got := s.run("q2", "df -k /data | tail -1 | awk '{print ($2 > 500*1024)}'"); got != "1" {
				t.Errorf("a volume that grew while no pod had it: %s", s.run("q2", "df -k /data"))
			}
			s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=640Mi", "pvc/sandbox", "--timeout=90s")
			if got := s.run("r", "df -k /data | tail -1 | awk '{print ($2 > 500*1024)}'"); got != "1" {
				t.Errorf("in the sandbox: %s", s.run("r", "df -k /data"))
			}
		})
	}
}

// 11.2: growth that is under way is finished by another external-resizer.
func TestFleet_TheResizerIsReplacedWhileClaimsGrow(t *testing.T) {
	t.Parallel()
	s := use(t)
	claims := []string{}
	for _, node := range names() {
		claims = append(claims, "c-"+node)
		s.claim("c-"+node, "crust-xfs", "320Mi", "ReadWriteOnce")
		s.pod("p-"+node, []string{"c-" + node + ":/data"}, away(node))
	}
	resizer := s.kubectl("get", "pods", "-n", system, "-o", "name", "-l", "app.kubernetes.io/name=crust-csi-resizer")
	for _, c := range claims {
		s.kubectl("patch", "pvc", c, "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}`)
		if c == claims[0] {
			s.kubectl("delete", "-n", system, resizer, "--grace-period=0", "--force")
		}
	}
	for _, c := range claims {
		s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=640Mi", "pvc/"+c, "--timeout=150s")
	}
	s.until(90*time.Second, "another one runs", func() (string, bool) {
		now := s.kubectl("get", "pods", "-n", system, "-o", "name", "-l", "app.kubernetes.io/name=crust-csi-resizer")
		return now, now != "" && now != resizer
	})
}

// 11.2: the free capacity of nodes decides where volumes go. A pod whose node is full waits, gets
// an event, and starts when there is room.
func TestFleet_CapacityOverUnequalNodes(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("most", "crust-ext4", "25Gi", "ReadWriteOnce")
	s.pod("filler", []string{"most:/data"}, away("node-2"))
	s.until(60*time.Second, "the scheduler can know that node-2 is unequally full", func() (string, bool) {
		got := s.kubectl("get", "csistoragecapacities", "-n", system, "-o",
			`jsonpath={range .items[?(@.storageClassName=='crust-ext4')]}{.nodeTopology.matchLabels.topology\.csi\.crust\.dev/node} {.capacity}{"\n"}{end}`)
		return got, !strings.Contains(got, "node-2 3") && !strings.Contains(got, "node-2 4")
	})
	for i := range 2 {
		s.claim(fmt.Sprintf("large-%d", i), "crust-ext4", "20Gi", "ReadWriteOnce")
	}
	s.pod("first", []string{"large-0:/data"}, away("node-2", "node-3"))
	if got := s.nodeOf("first"); got != "node-3" {
		t.Errorf("the volume that fits on node-3 alone has its pod on %s", got)
	}
	s.apply(podText("second", []string{"large-1:/data"}, away("node-2", "node-3")))
	s.said("Pod/second", "FailedScheduling: .*not have enough free storage")
	s.delete("filler")
	s.kubectl("delete", "pvc", "most", "-n", s.ns, "--timeout=90s")
	s.ready("second")
	if got := s.nodeOf("second"); got != "node-2" {
		t.Errorf("the second has its pod on %s", got)
	}
}

// 11.2: all claims of a pod are made on one node.
func TestFleet_SeveralClaimsOfOnePod(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("a", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.claim("b", "crust-xfs", "320Mi", "ReadWriteOncePod")
	s.claim("c", "crust-ext4", "64Mi", "ReadWriteOnce", "volumeMode: Block")
	s.pod("p", []string{"a:/a", "b:/b", "c:/dev/x"}, anywhere)
	for _, c := range []string{"a", "b", "c"} {
		if got := s.madeOn(c); got != s.nodeOf("p") {
			t.Errorf("the volume of %s is on %s, its pod on %s", c, got, s.nodeOf("p"))
		}
	}
}

// madeOn returns the node that a claim's volume is on.
func (s *space) madeOn(claim string) string {
	s.t.Helper()
	return s.get("pv/"+s.get("pvc/"+claim, ".spec.volumeName"),
		".spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].values[0]")
}

// 11.2: claims that do not wait for a pod are made on any node that their class allows, and pods
// follow them.
func TestFleet_ImmediateBinding(t *testing.T) {
	t.Parallel()
	s := use(t)
	class := func(name, more string) string {
		t.Cleanup(func() { s.kubectl("delete", "storageclass", name, "--ignore-not-found") })
		s.apply(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: ` + name +
			`}, provisioner: csi.crust.dev, volumeBindingMode: Immediate` + more + `}`)
		return name
	}
	any := class(s.ns, "")
	third := class(s.ns+"-3", ", allowedTopologies: [{matchLabelExpressions: [{key: topology.csi.crust.dev/node, values: [node-3]}]}]")
	s.claim("any", any, "64Mi", "ReadWriteOnce")
	s.claim("third", third, "64Mi", "ReadWriteOnce")
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.phase}=Bound", "pvc/any", "pvc/third", "--timeout=90s")
	if got := s.madeOn("third"); got != "node-3" {
		t.Errorf("the class allows node-3 alone; the volume is on %s", got)
	}
	s.pod("p", []string{"any:/data"}, anywhere)
	if got := s.nodeOf("p"); got != s.madeOn("any") {
		t.Errorf("the pod is on %s, its volume on %s", got, s.madeOn("any"))
	}
}

// 11.2: a StatefulSet with one member per node: each returns to its node and its data.
func TestFleet_AStatefulSetOverTheNodes(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.apply(`{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: db}, spec: {serviceName: db, replicas: 3, podManagementPolicy: Parallel,
selector: {matchLabels: {app: db}}, template: {metadata: {labels: {app: db}}, spec: {terminationGracePeriodSeconds: 1,
tolerations: [{key: ` + fleet + `, operator: Exists}],
affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: db}}}]}},
containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [{name: data, mountPath: /data}]}]}},
volumeClaimTemplates: [{metadata: {name: data}, spec: {storageClassName: crust-ext4, accessModes: [ReadWriteOncePod], resources: {requests: {storage: 64Mi}}}}]}}`)
	t.Cleanup(func() { s.kubectl("delete", "statefulset", "db", "-n", s.ns, "--timeout=60s") })
	where := func() []string {
		t.Helper()
		s.kubectl("rollout", "status", "-n", s.ns, "statefulset/db", "--timeout=110s")
		return []string{s.nodeOf("db-0"), s.nodeOf("db-1"), s.nodeOf("db-2")}
	}
	before := where()
	if all := slices.Sorted(slices.Values(before)); !slices.Equal(all, []string{"node", "node-2", "node-3"}) {
		t.Fatalf("one member a node: %v", before)
	}
	for i := range before {
		s.run(fmt.Sprintf("db-%d", i), fmt.Sprintf("echo %d >/data/id; sync", i))
	}
	s.kubectl("delete", "pod", "-n", s.ns, "--grace-period=1", "--timeout=90s", "-l", "app=db")
	s.until(90*time.Second, "there are three again", func() (string, bool) {
		got := s.kubectl("get", "pods", "-n", s.ns, "-o", "name")
		return got, strings.Count(got, "db-") == 3
	})
	if after := where(); !slices.Equal(before, after) {
		t.Errorf("before: %v, after: %v", before, after)
	}
	for i := range before {
		if got := s.run(fmt.Sprintf("db-%d", i), "cat /data/id"); got != fmt.Sprint(i) {
			t.Errorf("db-%d reads %q", i, got)
		}
	}
}
