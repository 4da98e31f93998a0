//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Pods of new classes start as fast as pods of a known class, because the scheduler learns the
// capacity at once.
func TestFleet_TheFirstPodsOfNewClasses(t *testing.T) {
	s := use(t)
	const many = 10
	start := func(kind string, class func(int) string, more string) time.Duration {
		t.Helper()
		objects, names := []string{}, []string{}
		for i := range many {
			name := fmt.Sprintf("%s-%d", kind, i)
			names = append(names, name)
			if more != "" {
				objects = append(objects, fmt.Sprintf(more, class(i)))
			}
			objects = append(objects, fmt.Sprintf(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: %s},
spec: {storageClassName: %s, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}}`, name, class(i)),
				podText(name, []string{name + ":/data"}))
		}
		begin := time.Now()
		s.apply(strings.Join(objects, "\n---\n"))
		s.ready(names...)
		took := time.Since(begin)
		s.kubectl(append([]string{"delete", "pod", "-n", s.ns, "--grace-period=1", "--timeout=90s"}, names...)...)
		return took
	}
	class := func(i int) string { return fmt.Sprintf("%s-%d", s.ns, i) }
	t.Cleanup(func() {
		for i := range many {
			s.kubectl("delete", "storageclass", class(i), "--ignore-not-found")
		}
	})
	known := start("known", func(int) string { return "crust-ext4" }, "")
	first := start("first", class, `{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: %s}, provisioner: csi.crust.dev,
volumeBindingMode: WaitForFirstConsumer, parameters: {pool: default, csi.storage.k8s.io/fstype: ext4}}`)
	t.Logf("%d pods of a known class: %s; of as many new classes: %s", many, known.Round(10*time.Millisecond),
		first.Round(10*time.Millisecond))
	if first > 3*known { // measured: 0.9 to 1.2; 4.1 with one update a second
		t.Errorf("the first pods of new classes take %s, pods of a known class %s", first, known)
	}
}

// The scheduler learns the room for a new class at once, on each node.
func TestFleet_TheRoomForANewClassIsKnownAtOnce(t *testing.T) {
	s := use(t)
	capacities := func(class string) (known bool, took time.Duration) {
		begin := time.Now()
		got := s.kubectl("get", "csistoragecapacities", "-n", system, "-o",
			`jsonpath={range .items[?(@.storageClassName=='`+class+`')]}{.capacity} {end}`)
		return len(strings.Fields(got)) == nodes && !slices.Contains(strings.Fields(got), "0"), time.Since(begin)
	}
	quickest, call := time.Hour, time.Duration(0)
	for i := range 3 { // of three tries, for the machine may be busy
		class := fmt.Sprintf("%s-%d", s.ns, i)
		t.Cleanup(func() { s.kubectl("delete", "storageclass", class, "--ignore-not-found") })
		s.apply(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: ` + class + `}, provisioner: csi.crust.dev,
volumeBindingMode: WaitForFirstConsumer, parameters: {pool: default, csi.storage.k8s.io/fstype: ext4}}`)
		begin := time.Now()
		s.until(2*time.Minute, "every node has told its room for the class", func() (string, bool) {
			known, took := capacities(class)
			call = max(call, took)
			return "", known
		})
		quickest = min(quickest, time.Since(begin))
	}
	t.Logf("the room for a new class was known after %s; a call took up to %s", quickest.Round(time.Millisecond), call.Round(time.Millisecond))
	if quickest > 5*time.Second+2*call {
		t.Errorf("the room for a new class is known after %s", quickest)
	}
}

// B8: on the node, without typing a socket, with the names that people gave.
func TestB08_WhoUsesWhat(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-xfs", "320Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"})
	ctl := func(args ...string) string {
		return s.kubectl(append([]string{"exec", "-n", system, s.daemon("csi-node", "node"), "-c", "csi-node", "--", "crustctl"},
			args...)...)
	}
	line := ""
	for l := range strings.Lines(ctl("volume", "list")) {
		if strings.Contains(l, s.ns+"/data") {
			line = l
		}
	}
	if !strings.Contains(line, "320.0 MiB") || !strings.Contains(line, "xfs") || !strings.Contains(line, s.ns+"/p") {
		t.Errorf("volume list: %q", line)
	}
	if got := ctl("volume", "show", s.ns+"/data"); !strings.Contains(got, s.get("pvc/data", ".spec.volumeName")) ||
		!strings.Contains(got, s.ns+"/p") || !strings.Contains(got, s.target("p", "data")) {
		t.Errorf("volume show:\n%s", got)
	}
	if got := ctl("pool", "list"); !strings.Contains(got, "default") || !strings.Contains(got, "good") {
		t.Errorf("pool list:\n%s", got)
	}
	if got := ctl("top", "--once"); !strings.Contains(got, s.ns+"/p") {
		t.Errorf("top:\n%s", got)
	}
	if got := ctl("history", "--claim", s.ns+"/data"); !strings.Contains(got, "create") {
		t.Errorf("history:\n%s", got)
	}
	// The container's file system is read-only.
	bundle, err := onNodeIn("/", "kubectl exec -n "+system+" "+s.daemon("csi-node", "node")+
		" -c csi-node -- crustctl support-bundle -o - | tar tz")
	if err != nil || !strings.Contains(bundle, "audit.jsonl") || !strings.Contains(bundle, "volumes.json") {
		t.Errorf("support-bundle: %v\n%s", err, bundle)
	}
}

// B5: growth beyond the pool's room is refused with an event on the claim, and keeps no pod from
// starting. A user who asked for too much asks for less, and gets it at the volume's next mount.
// 11.2: a quota counts growth, also growth that the node refused, and gets that back.
func TestB05_AClaimThatAskedForTooMuch(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.apply(`{apiVersion: v1, kind: ResourceQuota, metadata: {name: storage}, spec: {hard: {requests.storage: 1000Ti}}}`)
	used := func(want string) {
		t.Helper()
		s.until(time.Minute, "the quota has "+want+" in use", func() (string, bool) {
			got := s.get("resourcequota/storage", `.status.used.requests\.storage`)
			return got, got == want
		})
	}
	s.claim("data", "crust-xfs", "320Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"})
	ask := func(size string) {
		s.kubectl("patch", "pvc", "data", "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
	}
	again := func() {
		s.delete("p")
		s.pod("p", []string{"data:/data"})
	}
	used("320Mi")
	over := func(what string, out string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "exceeded quota: storage") {
			t.Errorf("%s beyond the quota: %v %s", what, err, out)
		}
	}
	out, err := s.try("patch", "pvc", "data", "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"1001Ti"}}}}`)
	over("growth", out, err)
	ask("900Ti")
	used("900Ti")
	out, err = try(t.Context(), `{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: other},
spec: {storageClassName: crust-xfs, accessModes: [ReadWriteOnce], resources: {requests: {storage: 200Ti}}}}`,
		"kubectl", "apply", "-n", s.ns, "-f", "-")
	over("a claim beside a growth that waits", out, err)
	s.until(90*time.Second, "the claim says why it does not grow", func() (string, bool) {
		got := s.get("pvc/data", ".status.conditions[?(@.type=='NodeResizeError')].message")
		return got, strings.Contains(got, "left to promise")
	})
	again()
	if got := s.run("p", "df -k /data | tail -1 | awk '{print ($2 < 400*1024)}'"); got != "1" {
		t.Errorf("it has grown: %s", s.run("p", "df -k /data"))
	}
	ask("640Mi")
	s.until(4*time.Minute, "it grows to what it asks for now", func() (string, bool) {
		again()
		got := s.run("p", "df -k /data | tail -1 | awk '{print ($2 > 500*1024)}'")
		return s.get("pvc/data", ".status"), got == "1"
	})
	used("640Mi")
}

// A raw block claim grows like any other: its pod's kubelet calls the driver on its node.
func TestFleet_ARawBlockClaimGrows(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce", "volumeMode: Block")
	s.pod("p", []string{"data:/dev/x"})
	s.kubectl("patch", "pvc", "data", "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"128Mi"}}}}`)
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=128Mi", "pvc/data", "--timeout=90s")
	if got := s.run("p", "blockdev --getsize64 /dev/x"); got != fmt.Sprint(128<<20) {
		t.Errorf("the pod's device has %s bytes", got)
	}
}
