//go:build kubernetes

package kubernetes_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/crusttest"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

const sandboxed = "runtimeClassName: crust"

// onlyPlaceholder fails unless the node's mount table has the placeholder at a pod's claim, and the
// claim's file system nowhere. It can be bound only if the kubelet has to, for a subPath.
func (s *space) onlyPlaceholder(pod, claim string) {
	s.t.Helper()
	bindable := strings.Contains(s.get("pod/"+pod, ".spec"), "subPath")
	if got := mountOf(s.t, s.target(pod, claim)); strings.Contains(got, "unbindable") == bindable ||
		!strings.Contains(got, " - tmpfs crust-deferred ") {
		s.t.Errorf("at the target: %q", got)
	}
	handle := s.kubectl("get", "pv", s.get("pvc/"+claim, ".spec.volumeName"), "-o", "jsonpath={.spec.csi.volumeHandle}")
	_, file, _ := strings.Cut(handle, ".")
	device := onNode(s.t, "losetup -n -O NAME,BACK-FILE | awk '/"+file+"[.]img/ { print $1 }'")
	if !strings.HasPrefix(device, "/dev/loop") {
		s.t.Fatalf("volume %s has device %q", handle, device)
	}
	if got := onNode(s.t, "grep -F ' "+device+" ' /proc/1/mountinfo || true"); got != "" {
		s.t.Errorf("the node shows %s", got)
	}
}

// C21, C22, story 1: everyone supports deferral. The file system is mounted in the sandbox, and
// never appears in the node's mount table.
func TestC21_C22_Story1(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, sandboxed, group(4321))
	s.said("Pod/p", "MountDeferred: volume pvc-.* \\(ext4\\) is left to the pod's sandbox")
	s.said("Pod/p", "MountedInSandbox: volume pvc-.* \\(ext4\\) is mounted in the pod's sandbox")
	target := s.target("p", "data")
	s.onlyPlaceholder("p", "data")
	s.run("p", "echo from the sandbox >/data/f; sync")
	if got := s.run("p", "grep ' /data ' /proc/self/mountinfo; stat -c %g /data /data/f"); !strings.Contains(got, " - ext4 /dev/loop") ||
		!strings.HasSuffix(got, "4321\n4321") {
		t.Errorf("in the pod: %s", got)
	}
	if got := onNode(t, "ls -A "+target); got != "" {
		t.Errorf("the node sees %q", got)
	}
	t.Logf("the node's mount table:\n%s\nthe pod's:\n%s", mountOf(t, target), s.run("p", "grep ' /data ' /proc/self/mountinfo"))
	if got := s.kubectl("exec", "-n", system, s.daemon("crust", "node"), "-c", "crustd", "--", "/opt/crust/bin/crustctl", "sandbox",
		"list"); !strings.Contains(got, target) || !strings.Contains(got, "published") {
		t.Errorf("crustctl sandbox list:\n%s", got)
	}
	// B8: crustctl shows the pod's name if csi-node answers too.
	if got := onNode(t, "/opt/crust/bin/crustctl sandbox list"); !strings.Contains(got, s.ns+"/p") {
		t.Errorf("crustctl sandbox list, on the node:\n%s", got)
	}
	// The kubelet gets usage numbers from the runtime.
	s.until(60*time.Second, "stats of the volume", func() (string, bool) {
		v := s.stats("p", "data")
		return fmt.Sprintf("%+v", v), v.CapacityBytes > 50<<20 && v.CapacityBytes < 65<<20 && v.Inodes > 0
	})
	s.delete("p")
	if got := mountOf(t, target); got != "" {
		t.Errorf("left: %s", got)
	}
	// Without the RuntimeClass it is an ordinary volume.
	s.pod("q", []string{"data:/data"})
	if got := s.run("q", "cat /data/f"); got != "from the sandbox" {
		t.Errorf("the node reads %q", got)
	}
	if got := mountOf(t, s.target("q", "data")); !strings.Contains(got, " - ext4 ") {
		t.Errorf("on the node: %s", got)
	}
}

// C22: several volumes of one pod are published at once, by one registration.
func TestC22_ThreeVolumesOfAPod(t *testing.T) {
	t.Parallel()
	s := use(t)
	var volumes []string
	for _, name := range []string{"a", "b", "c"} {
		s.claim(name, "crust-sandbox", "64Mi", "ReadWriteOncePod")
		volumes = append(volumes, name+":/"+name)
	}
	s.pod("p", volumes, sandboxed, group(3000))
	if got := s.run("p",
		"for d in a b c; do echo $d >/$d/f; done; cat /a/f /b/f /c/f; grep -c ' - ext4 ' /proc/self/mountinfo"); got != "a\nb\nc\n3" {
		t.Errorf("%q", got)
	}
	if got := s.kubectl("get", "events", "-n", s.ns, "-o", "jsonpath={.items[*].reason}"); strings.Contains(got, "SandboxMountFailed") ||
		strings.Contains(got, "FailedCreatePodSandBox") {
		t.Errorf("events %s", got)
	}
}

// C21: pods that only read share a volume, each in its sandbox. A pod that wants to write waits
// until they have ended.
func TestC21_ReadersOfOneVolume(t *testing.T) {
	t.Parallel()
	use(t).readersShare("crust-sandbox", sandboxed)
}

// readersShare has pods with that RuntimeClass read a volume of that StorageClass.
func (s *space) readersShare(class, runtimeClass string) {
	s.t.Helper()
	s.claim("data", class, "64Mi", "ReadWriteOnce")
	s.pod("writer", []string{"data:/data"})
	s.run("writer", "echo for readers >/data/f; sync")
	s.delete("writer")
	reader := func(name string) string {
		return strings.Replace(podText(name, []string{"data:/data"}, runtimeClass), "claimName: data", "claimName: data, readOnly: true", 1)
	}
	for _, name := range []string{"one", "two"} {
		s.apply(reader(name))
	}
	s.ready("one", "two")
	for _, name := range []string{"one", "two"} {
		s.said("Pod/"+name, "MountedInSandbox: volume pvc-.* \\(ext4\\)")
		s.onlyPlaceholder(name, "data")
		if got, err := s.tryRun(name, "cat /data/f; touch /data/g"); err == nil || got != "for readers" ||
			!strings.Contains(err.Error(), "Read-only file system") {
			s.t.Errorf("%s: %q %v", name, got, err)
		}
	}
	s.apply(podText("writer", []string{"data:/data"}))
	s.said("Pod/writer", "FailedMount: .*is deferred to the runtime of the pod")
	s.notRunning("writer")
	s.delete("one", "two")
	s.ready("writer")
	// Beside it, the node mounts for another reader.
	s.apply(reader("one"))
	s.ready("one")
	s.said("Pod/one", "MountedByHost: .*a pod of this node has it already")
}

type stats struct{ CapacityBytes, UsedBytes, Inodes int64 }

// stats returns the kubelet's stats of a claim.
func (s *space) stats(pod, claim string) stats {
	s.t.Helper()
	var all struct {
		Pods []struct {
			PodRef struct{ Name, Namespace string }
			Volume []struct {
				stats
				PVCRef struct{ Name string }
			}
		}
	}
	if err := json.Unmarshal([]byte(s.kubectl("get", "--raw", "/api/v1/nodes/node/proxy/stats/summary")), &all); err != nil {
		s.t.Fatal(err)
	}
	for _, p := range all.Pods {
		for _, v := range p.Volume {
			if p.PodRef.Name == pod && p.PodRef.Namespace == s.ns && v.PVCRef.Name == claim {
				return v.stats
			}
		}
	}
	return stats{}
}

// runtime serves a fake CRUST runtime on the node, for capabilities that the real one cannot lack.
// It returns the name of a RuntimeClass for it.
func (s *space) runtime(r *crusttest.Server) string {
	s.t.Helper()
	name := "less-" + s.ns
	b, err := os.ReadFile(filepath.Join(state, "pid"))
	if err != nil {
		s.t.Fatal(err)
	}
	l, err := crust.Listen("unix:///proc/"+strings.Fields(string(b))[0]+"/root/run/crust/"+name, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	g := grpc.NewServer()
	crustv1alpha1.RegisterRuntimeAssistedStorageManagementServer(g, r)
	go func() { _ = g.Serve(l) }() // until it is stopped
	s.t.Cleanup(func() { g.Stop(); onNode(s.t, "rm -f /run/crust/"+name) })
	return s.runtimeClass(name, "crust.csi.dev/fs-mgmt-socket: unix:///run/crust/"+name)
}

func (s *space) runtimeClass(name, annotation string) string {
	s.t.Helper()
	s.apply(fmt.Sprintf(`{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: %s, annotations: {%s}}, handler: crust}`,
		name, annotation))
	s.t.Cleanup(func() { s.kubectl("delete", "runtimeclass", name) })
	return name
}

// C21, stories 2 to 5: one participant refuses; the node mounts the volume, and the pod's events say why.
func TestC21_Stories2To5(t *testing.T) {
	t.Parallel()
	without := func(c crust.Capability) *crusttest.Server {
		r := crusttest.New()
		r.Capabilities = slices.DeleteFunc(r.Capabilities, func(have crust.Capability) bool { return have == c })
		return r
	}
	btrfs := crusttest.New()
	btrfs.FileSystems = []string{"btrfs"}
	for name, c := range map[string]struct {
		runtime *crusttest.Server // nil: the real one
		class   string
		mode    string
		pod     string
		change  func(string) string
		why     string // "": no event
	}{
		"story2": {runtime: without(crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS), pod: group(1234),
			why: "the runtime does not do fsGroup with policy Always"},
		"story2-subpath": {runtime: without(crustv1alpha1.RuntimeCapability_RPC_SUBPATH), change: func(y string) string {
			return strings.Replace(y, "mountPath: /data}", "mountPath: /data, subPath: a/b}", 1)
		}, why: "the runtime does not do subPath"},
		"subpath-expr": {change: func(y string) string {
			return strings.NewReplacer("volumeMounts:", "env: [{name: WHERE, valueFrom: {fieldRef: {fieldPath: status.podIP}}}], volumeMounts:",
				"mountPath: /data}", "mountPath: /data, subPathExpr: $(WHERE)}").Replace(y)
		}, why: "the pod uses a subPathExpr of it, and only the kubelet knows its value"},
		"story3":       {},
		"story4":       {class: "crust-ext4", why: "the volume's StorageClass does not allow runtime-assisted mounts"},
		"story5":       {runtime: btrfs, why: "its file system is none of btrfs"},
		"access-mode":  {mode: "ReadWriteOnce", why: "another pod may use the volume at the same time.*ReadWriteOncePod"},
		"block-volume": {change: func(y string) string { return y }, why: "the pod uses the volume as a raw block device"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := use(t)
			class, mode, runtime, path := "crust-sandbox", "ReadWriteOncePod", "crust", "/data"
			if c.class != "" {
				class = c.class
			}
			if c.mode != "" {
				mode = c.mode
			}
			switch {
			case c.runtime != nil:
				runtime = s.runtime(c.runtime)
			case name == "story3":
				runtime = s.runtimeClass("silent-"+s.ns, "")
			}
			if name == "block-volume" {
				path = "/dev/data"
				s.claim("data", class, "64Mi", mode, "volumeMode: Block")
			} else {
				s.claim("data", class, "64Mi", mode)
			}
			more := []string{"runtimeClassName: " + runtime}
			if c.pod != "" {
				more = append(more, c.pod)
			}
			text := podText("p", []string{"data:" + path}, more...)
			if c.change != nil {
				text = c.change(text)
			}
			s.apply(text)
			s.ready("p")
			if c.why != "" {
				s.said("Pod/p", "MountedByHost: volume pvc-.* was mounted by the host because .*"+c.why)
			} else if got := s.kubectl("get", "events", "-n", s.ns, "-o", "jsonpath={.items[*].reason}"); strings.Contains(got,
				"MountedByHost") {
				t.Errorf("events %s", got)
			}
			if path == "/data" {
				if got := mountOf(t, s.target("p", "data")); !strings.Contains(got, " - ext4 /dev/loop") {
					t.Errorf("on the node: %s", got)
				}
				s.run("p", "touch /data/f")
			}
		})
	}
}

// C17, C22, story 6: a runtime grows no file systems. The claim says so, and the volume grows after
// the pod has ended.
func TestC17_C22_Story6(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, sandboxed)
	s.kubectl("patch", "pvc", "data", "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"128Mi"}}}}`)
	if !allCapabilities(t) {
		s.until(60*time.Second, "the claim says that the runtime does not grow it", func() (string, bool) {
			got := s.get("pvc/data", ".status.conditions[?(@.type=='NodeResizeError')].message")
			return got, strings.Contains(got, "cannot grow its file system: end the pod")
		})
		s.delete("p")
		s.pod("p", []string{"data:/data"}, sandboxed)
	}
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=128Mi", "pvc/data", "--timeout=90s")
	s.until(30*time.Second, "the sandbox sees it", func() (string, bool) {
		got := s.run("p", "df -k /data | tail -1 | awk '{print $2}'")
		return got, len(got) >= 6
	})
}

// C22: a claim is enlarged while no pod has it. The kubelet grows the volume before there is a
// sandbox that could.
func TestC22_GrownWhileNoPodHadIt(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.pod("p", []string{"data:/data"}, sandboxed)
	s.delete("p")
	s.kubectl("patch", "pvc", "data", "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"128Mi"}}}}`)
	s.until(60*time.Second, "the persistent volume is larger", func() (string, bool) {
		got := s.kubectl("get", "pv", s.get("pvc/data", ".spec.volumeName"), "-o", "jsonpath={.spec.capacity.storage}")
		return got, got == "128Mi"
	})
	s.pod("q", []string{"data:/data"}, sandboxed)
	if !allCapabilities(t) {
		// crustd cannot grow a mounted ext4. The claim says what helps.
		s.until(60*time.Second, "the claim says why ext4 does not grow", func() (string, bool) {
			got := s.get("pvc/data", ".status.conditions[?(@.type=='NodeResizeError')].message")
			return got, strings.Contains(got, "cannot grow its file system: end the pod")
		})
		s.delete("q")
		s.pod("q", []string{"data:/data"}, sandboxed)
	}
	s.onlyPlaceholder("q", "data")
	if got := s.run("q", "df -k /data | tail -1 | awk '{print $2}'"); len(got) < 6 {
		t.Errorf("the sandbox sees %s KiB", got)
	}
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=128Mi", "pvc/data", "--timeout=90s")
}

// C23: a failure on the way to the sandbox fails the pod with a clear error. The node mounts
// nothing instead.
func TestC23_FailuresFailThePod(t *testing.T) {
	t.Parallel()
	t.Run("no runtime", func(t *testing.T) {
		t.Parallel()
		s := use(t)
		class := s.runtimeClass("none-"+s.ns, "crust.csi.dev/fs-mgmt-socket: unix:///run/crust/nobody")
		s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
		s.apply(podText("p", []string{"data:/data"}, "runtimeClassName: "+class))
		s.said("Pod/p", "SandboxMountFailed: volume pvc-.*: it cannot be decided who mounts it: the runtime at unix:///run/crust/nobody")
		s.said("Pod/p", "FailedMount: .*cannot be decided")
		s.notRunning("p")
	})
	t.Run("publish refused", func(t *testing.T) {
		t.Parallel()
		s := use(t)
		r := crusttest.New()
		r.Fail = func(_ context.Context, call string, _ proto.Message) error {
			if call == "RuntimePublishVolume" {
				return status.Error(codes.FailedPrecondition, "the disk does not fit")
			}
			return nil
		}
		class := s.runtime(r)
		s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
		s.apply(podText("p", []string{"data:/data"}, "runtimeClassName: "+class))
		s.said("Pod/p", "SandboxMountFailed: .*cannot be mounted there: .*the disk does not fit")
		s.said("Pod/p", "FailedCreatePodSandBox: .*the disk does not fit")
		s.notRunning("p")
		s.onlyPlaceholder("p", "data")
	})
}

func (s *space) notRunning(pod string) {
	s.t.Helper()
	if got := s.get("pod/"+pod, ".status.phase"); got != "Pending" {
		s.t.Errorf("pod %s is %s", pod, got)
	}
	if got := mountOf(s.t, s.target(pod, "data")); strings.Contains(got, "ext4") {
		s.t.Errorf("the node mounted it: %s", got)
	}
}
