//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestStatefulSetRollingRestart(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.apply(`{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: db}, spec: {serviceName: db, replicas: 3, podManagementPolicy: Parallel,
selector: {matchLabels: {app: db}}, template: {metadata: {labels: {app: db}}, spec: {terminationGracePeriodSeconds: 1, securityContext: {runAsUser: 1000, fsGroup: 2000},
containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [{name: data, mountPath: /data}]}]}},
volumeClaimTemplates: [{metadata: {name: data}, spec: {storageClassName: crust-ext4, accessModes: [ReadWriteOncePod], resources: {requests: {storage: 64Mi}}}}]}}`)
	wait := func() { t.Helper(); s.kubectl("rollout", "status", "-n", s.ns, "statefulset/db", "--timeout=110s") }
	wait()
	for i := range 3 {
		s.run(fmt.Sprintf("db-%d", i), fmt.Sprintf("echo %d >/data/id", i))
	}
	s.kubectl("rollout", "restart", "-n", s.ns, "statefulset/db")
	wait()
	for i := range 3 {
		if got := s.run(fmt.Sprintf("db-%d", i), "cat /data/id; stat -c %g /data"); got != fmt.Sprintf("%d\n2000", i) {
			t.Errorf("db-%d reads %q", i, got)
		}
	}
	s.kubectl("delete", "statefulset", "db", "-n", s.ns, "--timeout=60s")
}

// Delete the claim before its pod, the pod without waiting, and everything at once: nothing is
// left.
func TestDeletedInEveryOrder(t *testing.T) {
	t.Parallel()
	for name, orders := range map[string][][]string{
		"claim first":    {{"delete", "pvc", "data", "--wait=false"}, {"delete", "pod", "p", "--grace-period=1"}},
		"pod first":      {{"delete", "pod", "p", "--grace-period=1"}, {"delete", "pvc", "data"}},
		"pod by force":   {{"delete", "pod", "p", "--grace-period=0", "--force"}, {"delete", "pvc", "data", "--timeout=60s"}},
		"all by force":   {{"delete", "pod,pvc", "--all", "--grace-period=0", "--force", "--timeout=60s"}},
		"while it waits": {{"delete", "pod", "p", "--grace-period=0", "--force"}, {"delete", "pvc", "data", "--timeout=60s"}},
	} {
		for _, class := range []string{"", sandboxed} {
			t.Run(name+" "+strings.TrimPrefix(class, "runtimeClassName: "), func(t *testing.T) {
				t.Parallel()
				s := use(t)
				s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
				var more []string
				if class != "" {
					more = append(more, class)
				}
				s.apply(podText("p", []string{"data:/data"}, more...))
				if name != "while it waits" {
					s.ready("p")
				} else {
					time.Sleep(500 * time.Millisecond)
				}
				uid := s.get("pod/p", ".metadata.uid")
				for _, argv := range orders {
					s.kubectl(append(argv, "-n", s.ns)...)
				}
				s.until(60*time.Second, "nothing of the pod is mounted", func() (string, bool) {
					got := onNode(t, "grep "+uid+" /proc/1/mountinfo || true")
					return got, got == ""
				})
			})
		}
	}
}

// Not beside other tests: the node takes no pods meanwhile.
func TestNodeDrained(t *testing.T) {
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.apply(`{apiVersion: apps/v1, kind: Deployment, metadata: {name: app}, spec: {replicas: 1, strategy: {type: Recreate}, selector: {matchLabels: {app: drained}},
template: {metadata: {labels: {app: drained}}, spec: {terminationGracePeriodSeconds: 1, containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [{name: v, mountPath: /data}]}],
volumes: [{name: v, persistentVolumeClaim: {claimName: data}}]}}}}`)
	up := func() string {
		t.Helper()
		s.kubectl("rollout", "status", "-n", s.ns, "deployment/app", "--timeout=90s")
		return s.get("pods", ".items[0].metadata.name")
	}
	s.run(up(), "echo kept >/data/f")
	t.Cleanup(func() { s.kubectl("uncordon", "node") })
	s.kubectl("drain", "node", "--pod-selector=app=drained", "--ignore-daemonsets", "--timeout=60s")
	s.until(60*time.Second, "the volume is unmounted", func() (string, bool) {
		got := onNode(t, "grep kubernetes.io~csi/"+s.get("pvc/data", ".spec.volumeName")+" /proc/1/mountinfo || true")
		return got, got == ""
	})
	s.kubectl("uncordon", "node")
	if got := s.run(up(), "cat /data/f"); got != "kept" {
		t.Errorf("%q", got)
	}
	s.kubectl("delete", "deployment", "app", "-n", s.ns, "--timeout=60s")
}
