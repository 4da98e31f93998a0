//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const microVM = "runtimeClassName: crust-vm"

// useMicroVMs runs crustd for microVMs on the nodes. Emulated guests take processors from everything else, so one test does this.
func useMicroVMs(t testing.TB) *space {
	t.Helper()
	s := use(t)
	dir, err := filepath.Abs("../../deploy/kubernetes/microvm")
	if err != nil {
		t.Fatal(err)
	}
	files := []string{"-f", filepath.Join(dir, "daemonset.yaml"), "-f", filepath.Join(dir, "runtimeclass.yaml")}
	s.kubectl(append([]string{"apply"}, files...)...)
	t.Cleanup(func() {
		s.clear() // while crustd can let go of the volumes
		s.kubectl(append([]string{"delete", "--timeout=90s"}, files...)...)
		if got := onNode(t, "ls /run/crust/pods 2>/dev/null | grep -v '^lock$' || true; pgrep -a qemu-system || true"); got != "" {
			t.Errorf("left of microVMs: %s", got)
		}
	})
	s.kubectl("-n", system, "rollout", "status", "daemonset/crust-vm", "--timeout=90s")
	return s
}

// mountsAnywhere makes a StorageClass: a volume that a guest had is not mounted by the node, unless its class allows that.
func (s *space) mountsAnywhere(name string) {
	s.t.Helper()
	s.apply(fmt.Sprintf(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: %s}, provisioner: csi.crust.dev,
volumeBindingMode: WaitForFirstConsumer, parameters: {pool: default, csi.storage.k8s.io/fstype: ext4,
  allowRuntimeAssistedMount: "true", hostMayMount: "true"}}`, name))
	s.t.Cleanup(func() { s.kubectl("delete", "storageclass", name) })
}

// C12, C15, C24, story 1: a pod in a microVM is a pod as any other for its user, and the node's kernel never sees its file system.
func TestC12_C15_C24_APodInAMicroVMIsAPod(t *testing.T) {
	t.Parallel()
	s := useMicroVMs(t)
	s.mountsAnywhere("crust-both")
	s.claim("data", "crust-both", "64Mi", "ReadWriteOncePod")
	s.claim("raw", "crust-ext4", "64Mi", "ReadWriteOnce", "volumeMode: Block")
	s.apply(`{apiVersion: v1, kind: ConfigMap, metadata: {name: words}, data: {word: from the API server}}`)
	s.apply(fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {terminationGracePeriodSeconds: 5, %s,
securityContext: {fsGroup: 4321},
initContainers: [{name: first, image: "localhost/test/busybox:1", command: [sh, -c, "echo begun >/data/init"],
  volumeMounts: [{name: data, mountPath: /data}]}],
containers: [{name: c, image: "localhost/test/busybox:1", resources: {requests: {cpu: 500m}, limits: {memory: 128Mi}},
  command: [sh, -c, "echo hello from $(uname -r); mkdir -p /tmp/w; echo page >/tmp/w/f; trap 'echo stopped >/data/end; exit 0' TERM; httpd -p 8080 -h /tmp/w; udp-echo 127.0.0.1:9 :5353 & while :; do sleep 0.1; done"],
  readinessProbe: {httpGet: {path: /f, port: 8080}, periodSeconds: 1},
  volumeDevices: [{name: raw, devicePath: /blocks/raw}],
  volumeMounts: [{name: data, mountPath: /data}, {name: data, mountPath: /part, subPath: a/part},
    {name: data, mountPath: /init, subPath: init, readOnly: true}, {name: words, mountPath: /words}, {name: sub, mountPath: /empty}]}],
volumes: [{name: data, persistentVolumeClaim: {claimName: data}}, {name: raw, persistentVolumeClaim: {claimName: raw}}, {name: words, configMap: {name: words}}, {name: sub, emptyDir: {}}]}}`, microVM))
	s.until(4*time.Minute, "the pod is ready: the kubelet's probe reaches it", func() (string, bool) {
		got := s.get("pod/p", ".status.conditions[?(@.type==\"Ready\")].status")
		return s.get("pod/p", ".status") + got, got == "True"
	})
	node := onNode(t, "uname -r")
	if got := s.kubectl("logs", "-n", s.ns, "p"); !strings.HasPrefix(got, "hello from ") || strings.Contains(got, node) {
		t.Errorf("logs %q; the node's kernel is %s", got, node)
	}
	s.said("Pod/p", "MountedInSandbox: volume pvc-.* \\(ext4\\) is mounted in the pod's sandbox")
	s.onlyPlaceholder("p", "data")
	table := s.run("p", "grep ' /data ' /proc/self/mountinfo")
	if !strings.Contains(table, " - ext4 /dev/sd") {
		t.Errorf("in the guest: %s", table)
	}
	t.Logf("the node's mount table:\n%s\nthe guest's:\n%s", mountOf(t, s.target("p", "data")), table)
	if got := s.run("p", "cat /data/init /words/word; echo; stat -c %g /data /data/init; echo x >/empty/f && cat /empty/f; hostname"); got !=
		"begun\nfrom the API server\n4321\n4321\nx\np" {
		t.Errorf("in the pod: %q", got)
	}
	if got := s.run("p", "cat /init; echo part >/part/f; cat /data/a/part/f; stat -c '%a %g' /part; grep -c ' - ext4 /dev/sd' /proc/self/mountinfo"); got !=
		"begun\npart\n2775 4321\n3" {
		t.Errorf("sub-paths in the pod: %q", got)
	}
	if got := s.run("p", "ls /var/run/secrets/kubernetes.io/serviceaccount"); !strings.Contains(got, "token") {
		t.Errorf("the pod's account: %q", got)
	}
	s.until(60*time.Second, "stats of the volume, from the guest", func() (string, bool) {
		v := s.stats("p", "data")
		return fmt.Sprintf("%+v", v), v.CapacityBytes > 50<<20 && v.CapacityBytes < 65<<20 && v.Inodes > 0
	})
	if got := s.run("p", "stat -c %F /blocks/raw; echo raw bytes | dd of=/blocks/raw bs=512 seek=7 2>/dev/null; blockdev --getsize64 /blocks/raw"); got !=
		"block special file\n67108864" {
		t.Errorf("a raw block volume: %q", got)
	}
	s.kubectl("patch", "pvc", "raw", "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"128Mi"}}}}`)
	s.until(2*time.Minute, "the raw block volume grows while the pod has it", func() (string, bool) {
		got := s.run("p", "blockdev --getsize64 /blocks/raw")
		return got, got == "134217728"
	})
	ip := s.get("pod/p", ".status.podIP")
	s.until(2*time.Minute, "the pod answers a datagram", func() (string, bool) {
		got, err := onNodeIn("/", fmt.Sprintf("exec 3<>/dev/udp/%s/5353 && echo hello >&3 && timeout 2 head -c 7 <&3", ip))
		return fmt.Sprint(got, err), err == nil && got == "hello\n!"
	})
	s.kubectl("delete", "pod", "p", "-n", s.ns, "--timeout=90s")

	// Its claim goes to a sandbox that is a mount namespace, and then with the other one to an ordinary pod.
	s.pod("ns", []string{"data:/data"}, sandboxed)
	s.said("Pod/ns", "MountedInSandbox: volume pvc-.* \\(ext4\\) is mounted in the pod's sandbox")
	if got := s.run("ns", "cat /data/init /data/end; uname -r; echo namespace >/data/n"); got != "begun\nstopped\n"+node {
		t.Errorf("a namespace reads %q", got)
	}
	s.delete("ns")
	s.pod("q", []string{"data:/data", "raw:/dev/disk"})
	if got := s.run("q", "cat /data/init /data/end /data/n"); got != "begun\nstopped\nnamespace" {
		t.Errorf("the node reads %q", got)
	}
	if got := s.run("q", "dd if=/dev/disk bs=512 skip=7 count=1 2>/dev/null | head -1"); got != "raw bytes" {
		t.Errorf("the node's pod reads %q of the raw block volume", got)
	}
	s.delete("q")

	// If QEMU dies, the kubelet creates the pod's sandbox again.
	s.apply(podText("r", []string{"data:/data"}, microVM))
	s.until(4*time.Minute, "the pod runs", func() (string, bool) {
		got := s.get("pod/r", ".status.phase")
		return s.get("pod/r", ".status"), got == "Running"
	})
	s.run("r", "echo kept >/data/f; sync")
	onNode(t, "pkill -KILL qemu-system")
	s.until(4*time.Minute, "the pod runs again, with its volume", func() (string, bool) {
		got, err := s.tryRun("r", "cat /data/f")
		return fmt.Sprint(got, err, s.get("pod/r", ".status.containerStatuses[0]")), err == nil && got == "kept"
	})
	s.kubectl("debug", "-n", s.ns, "r", "--image=localhost/test/busybox:1", "-c", "debugger", "--target=c", "--", "sh", "-c",
		"tr '\\0' ' ' </proc/1/cmdline")
	s.until(4*time.Minute, "a debugger sees the processes of a container", func() (string, bool) {
		got, err := s.try("logs", "-n", s.ns, "r", "-c", "debugger")
		return fmt.Sprint(got, err), err == nil && strings.Contains(got, "sleep")
	})
	s.delete("r")

	// The containers of a pod share their processes if it asks for that.
	s.apply(fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: pair}, spec: {restartPolicy: Never, shareProcessNamespace: true, %s,
terminationGracePeriodSeconds: 0, containers: [{name: a, image: "localhost/test/busybox:1", command: [sleep, "12345"]},
  {name: b, image: "localhost/test/busybox:1", command: [sh, -c,
    "until for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; done | grep -q 'sleep 123''45 '; do sleep 0.2; done; echo seen"]}]}}`, microVM))
	s.until(4*time.Minute, "one sees the other", func() (string, bool) {
		got, err := s.try("logs", "-n", s.ns, "pair", "-c", "b")
		return fmt.Sprint(got, err), err == nil && got == "seen"
	})
	s.delete("pair")
	s.apply(fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: greedy}, spec: {restartPolicy: Never, %s,
containers: [{name: c, image: "localhost/test/busybox:1", resources: {requests: {cpu: 500m}, limits: {memory: 48Mi}},
  command: [sh, -c, "tail /dev/zero"]}]}}`, microVM))
	s.until(4*time.Minute, "a container that takes too much memory is killed for that", func() (string, bool) {
		got := s.get("pod/greedy", ".status.containerStatuses[0].state.terminated.reason")
		return s.get("pod/greedy", ".status"), got == "OOMKilled"
	})
	// What a microVM cannot do is said where the pod's user looks.
	s.apply(podText("host", nil, microVM, "hostNetwork: true"))
	s.said("Pod/host", "FailedCreatePodSandBox: .*hostNetwork: a microVM has no network but its pod's")
}
