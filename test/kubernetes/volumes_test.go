//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestDynamicVolumes(t *testing.T) {
	t.Parallel()
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			s := use(t)
			s.claim("data", "crust-"+fs, "400Mi", "ReadWriteOnce")
			s.pod("p", []string{"data:/data"})
			s.run("p", "echo from the pod >/data/f; sync")
			if got := s.run("p", "grep ' /data ' /proc/self/mountinfo"); !strings.Contains(got, " - "+fs+" ") {
				t.Errorf("in the pod: %s", got)
			}
			target := s.target("p", "data")
			if got := mountOf(t, target); !strings.Contains(got, " - "+fs+" /dev/loop") {
				t.Errorf("on the node: %s", got)
			}
			if got := onNode(t, "cat "+target+"/f"); got != "from the pod" {
				t.Errorf("the node reads %q", got)
			}
			// The next pod reads what was written.
			s.delete("p")
			if got := mountOf(t, target); got != "" {
				t.Errorf("still mounted: %s", got)
			}
			s.pod("q", []string{"data:/data"})
			if got := s.run("q", "cat /data/f"); got != "from the pod" {
				t.Errorf("the next pod reads %q", got)
			}
		})
	}
}

func TestBlockVolume(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("raw", "crust-ext4", "64Mi", "ReadWriteOnce", "volumeMode: Block")
	s.pod("p", []string{"raw:/dev/disk"})
	if got := s.run("p", "stat -c %F /dev/disk; blockdev --getsize64 /dev/disk"); got != "block special file\n67108864" {
		t.Error(got)
	}
	s.run("p", "echo raw bytes | dd of=/dev/disk bs=512 seek=7 conv=fsync")
	s.delete("p")
	s.pod("q", []string{"raw:/dev/disk"})
	if got := s.run("q", "dd if=/dev/disk bs=512 skip=7 count=1 2>/dev/null | head -1"); got != "raw bytes" {
		t.Errorf("%q", got)
	}
}

// R04: nobody can write through a read-only block volume, not even root.
func TestR04_BlockVolumeReadOnly(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("raw", "crust-ext4", "64Mi", "ReadWriteOnce", "volumeMode: Block")
	s.pod("w", []string{"raw:/dev/disk"})
	s.run("w", "echo first | dd of=/dev/disk conv=fsync")
	s.delete("w")
	pod := podText("r", []string{"raw:/dev/disk"})
	s.apply(strings.Replace(pod, "claimName: raw}", "claimName: raw, readOnly: true}", 1))
	s.ready("r")
	if out, err := s.tryRun("r", "echo second | dd of=/dev/disk conv=fsync"); err == nil {
		t.Errorf("written: %s", out)
	}
	if got := s.run("r", "head -c 5 /dev/disk"); got != "first" {
		t.Errorf("%q", got)
	}
}

func TestWaitForFirstConsumerAndCapacity(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.until(60*time.Second, "capacity objects for every class", func() (string, bool) {
		got := s.kubectl("get", "csistoragecapacities", "-n", system,
			"-o", `jsonpath={range .items[*]}{.storageClassName}={.capacity}{"\n"}{end}`)
		for _, class := range []string{"crust-ext4", "crust-xfs", "crust-btrfs", "crust-thick"} {
			if !regexp.MustCompile(class + `=[1-9]`).MatchString(got) {
				return got, false
			}
		}
		return got, true
	})
	s.claim("waits", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.said("PersistentVolumeClaim/waits", "WaitForFirstConsumer")
	if got := s.get("pvc/waits", ".status.phase"); got != "Pending" {
		t.Errorf("before a pod: %s", got)
	}
	// The scheduler knows the room and does not try more.
	s.claim("huge", "crust-thick", "100Ti", "ReadWriteOnce")
	s.apply(podText("huge", []string{"huge:/data"}))
	s.said("Pod/huge", "FailedScheduling.*did not have enough free storage")
	s.pod("p", []string{"waits:/data"})
	if got := s.get("pvc/waits", ".status.phase"); got != "Bound" {
		t.Errorf("with a pod: %s", got)
	}
	if got := s.kubectl("get", "pv", s.get("pvc/waits", ".spec.volumeName"),
		"-o", "jsonpath={.spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0]}"); !strings.Contains(got,
		"topology.csi.crust.dev/node") {
		t.Errorf("affinity %s", got)
	}
}

func TestAccessModes(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("shared", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("a", []string{"shared:/data"})
	s.pod("b", []string{"shared:/data"})
	s.run("a", "echo of a >/data/f")
	if got := s.run("b", "cat /data/f"); got != "of a" {
		t.Errorf("the second pod of a ReadWriteOnce volume reads %q", got)
	}
	s.claim("single", "crust-ext4", "64Mi", "ReadWriteOncePod")
	s.pod("c", []string{"single:/data"})
	s.apply(podText("d", []string{"single:/data"}))
	s.said("Pod/d", "FailedScheduling.*ReadWriteOncePod")
	s.delete("c")
	s.ready("d")
}

func group(gid int) string {
	return fmt.Sprintf("securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: %d}", gid)
}

// F01: the kubelet leaves the group to the driver and walks nothing.
func TestF01_FSGroupIsDelegated(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"}, group(4321))
	s.run("p", "echo mine >/data/f")
	if got := s.run("p", "stat -c '%u:%g %a' /data /data/f"); !strings.HasPrefix(got, "0:4321 2775\n1000:4321 ") {
		t.Error(got)
	}
	// The driver records the change on the volume; the kubelet would not.
	if got := onNode(t, "getfattr --absolute-names --only-values -n trusted.crust.ownership "+s.target("p", "data")); !strings.Contains(got,
		"4321") {
		t.Errorf("the record on the volume: %q", got)
	}
}

// F05: two pods with different groups use one volume at once.
func TestF05_TwoGroupsAtOnce(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "test-idmap", "64Mi", "ReadWriteOnce")
	s.pod("a", []string{"data:/data"}, group(3000))
	s.pod("b", []string{"data:/data"}, group(4000))
	s.run("a", "echo a >/data/a; chmod 660 /data/a")
	s.run("b", "echo b >/data/b; chmod 660 /data/b")
	for pod, gid := range map[string]string{"a": "3000", "b": "4000"} {
		if got := s.run(pod, "stat -c %g /data /data/a /data/b | sort -u"); got != gid {
			t.Errorf("pod %s of group %s sees %q", pod, gid, got)
		}
		if got := s.run(pod, "cat /data/a /data/b"); got != "a\nb" {
			t.Errorf("pod %s reads %q", pod, got)
		}
	}
}

// F02, F09: between two pods the driver gives 100,000 files to another group, in parallel, and not
// again for the next pod.
func TestF02_100kFilesChangeTheirGroup(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-xfs", "1Gi", "ReadWriteOnce")
	s.pod("a", []string{"data:/data"}, group(3000))
	target := s.target("a", "data")
	if out, err := onNodeIn(target,
		`for d in $(seq 100); do mkdir $d; (cd $d && seq 1000 | xargs touch); done && chgrp -R 3000 .`); err != nil {
		t.Fatal(out, err)
	}
	s.delete("a")
	s.pod("b", []string{"data:/data"}, group(4000))
	if got := s.run("b", "find /data ! -group 4000 | wc -l; find /data | wc -l"); got != "0\n100101" {
		t.Errorf("files of another group, and of all: %q", got)
	}
	s.delete("b")
	looked := func() float64 { return metric(t, "crust_ownership_files_looked_at_total") }
	before := looked()
	s.pod("c", []string{"data:/data"}, group(4000))
	// Other tests' volumes are small.
	if more := looked() - before; more > 50_000 {
		t.Errorf("%v files were looked at for a pod of the same group", more)
	}
	if got := s.run("c", "stat -c %g /data/7/7"); got != "4000" {
		t.Error(got)
	}
}

// U01, U02: pods with their own user namespaces share one volume. Files belong to root for both
// pods and on disk.
func TestU01_HostUsersFalse(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	if s.refuses(userNamespaces, podText("unmapped", []string{"data:/data"}, "hostUsers: false")) {
		return
	}
	s.pod("a", []string{"data:/data"}, "hostUsers: false")
	s.pod("b", []string{"data:/data"}, "hostUsers: false")
	ranges := map[string]bool{}
	for _, pod := range []string{"a", "b"} {
		s.run(pod, "echo of "+pod+" >/data/"+pod)
		f := strings.Fields(s.run(pod, "cat /proc/self/uid_map"))
		if len(f) != 3 || f[1] == "0" {
			t.Errorf("pod %s has the map %v", pod, f)
		}
		ranges[f[1]] = true
	}
	if len(ranges) != 2 {
		t.Errorf("ranges %v", ranges)
	}
	for _, pod := range []string{"a", "b"} {
		if got := s.run(pod, "stat -c '%u:%g' /data/a /data/b; cat /data/a /data/b"); got != "0:0\n0:0\nof a\nof b" {
			t.Errorf("pod %s: %q", pod, got)
		}
	}
	if got := onNode(t, "stat -c '%u:%g' "+s.target("a", "data")+"/[ab]"); got != "0:0\n0:0" {
		t.Errorf("on disk %q", got)
	}
}

// R01: readOnly, by the mount and by the volume.
func TestR01_ReadOnly(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.written()
	s.pod("mount", []string{"data:/data:ro"})
	s.apply(strings.Replace(podText("volume", []string{"data:/data"}), "claimName: data}", "claimName: data, readOnly: true}", 1))
	s.ready("volume")
	s.readOnly("mount", "volume")
}

// R01: readOnly applies to mounts below, too.
func TestR01_RecursivelyReadOnly(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.written()
	pod := strings.Replace(podText("recursive", []string{"data:/data:ro"}), "readOnly: true}",
		"readOnly: true, recursiveReadOnly: Enabled}", 1)
	if s.refuses(recursiveReadOnly, pod) {
		return
	}
	s.apply(pod)
	s.ready("recursive")
	s.readOnly("recursive")
	if got := s.get("pod/recursive", ".status.containerStatuses[0].volumeMounts[0].recursiveReadOnly"); got != "Enabled" {
		t.Errorf("status %q", got)
	}
}

func TestSubPath(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.apply(strings.Replace(podText("p", []string{"data:/data"}), "mountPath: /data}", "mountPath: /data, subPath: a/b}", 1))
	s.ready("p")
	s.run("p", "echo sub >/data/f")
	s.pod("q", []string{"data:/data"})
	if got := s.run("q", "cat /data/a/b/f"); got != "sub" {
		t.Error(got)
	}
}

// Growth while a writer runs: xfs online. ext4 needs CAP_SYS_RESOURCE for that, and says so if it
// is missing.
func TestExpansionWhileWriting(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("xfs", "crust-xfs", "320Mi", "ReadWriteOnce")
	s.claim("ext4", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"xfs:/x", "ext4:/e"})
	s.run("p", "(while :; do dd if=/dev/urandom of=/x/w bs=64k count=16 conv=fsync 2>/dev/null && sha256sum /x/w >/x/sum || echo >/x/failed; done) >/dev/null 2>&1 &")
	for _, c := range []string{"xfs=640Mi", "ext4=128Mi"} {
		name, size, _ := strings.Cut(c, "=")
		s.kubectl("patch", "pvc", name, "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
	}
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=640Mi", "pvc/xfs", "--timeout=90s")
	if got := s.run("p", "df -k /x | tail -1 | awk '{print ($2 > 500*1024)}'; ls /x"); !strings.HasPrefix(got, "1\n") ||
		strings.Contains(got, "failed") {
		t.Errorf("%q", got)
	}
	if allCapabilities(t) {
		s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=128Mi", "pvc/ext4", "--timeout=90s")
	} else {
		s.until(60*time.Second, "the claim says why ext4 does not grow", func() (string, bool) {
			got := s.get("pvc/ext4", ".status.conditions[?(@.type=='NodeResizeError')].message")
			return got, strings.Contains(got, "CAP_SYS_RESOURCE") && strings.Contains(got, "stop its pods")
		})
		s.delete("p") // it grows at its next mount
		s.pod("p", []string{"ext4:/e"})
		s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=128Mi", "pvc/ext4", "--timeout=90s")
	}
	if got := s.run("p", "df -k /e | tail -1 | awk '{print ($2 > 100*1024)}'"); got != "1" {
		t.Errorf("ext4: %s", s.run("p", "df -k /e"))
	}
}

func (s *space) snapshot(name, claim string) {
	s.t.Helper()
	s.apply(fmt.Sprintf(`{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: %s},
spec: {volumeSnapshotClassName: crust, source: {persistentVolumeClaimName: %s}}}`, name, claim))
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.readyToUse}=true", "volumesnapshot/"+name, "--timeout=90s")
}

func TestSnapshotRestoredLargerAndClone(t *testing.T) {
	t.Parallel()
	for _, fs := range []string{"ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			t.Parallel()
			s := use(t)
			s.claim("data", "crust-"+fs, "320Mi", "ReadWriteOnce")
			s.pod("p", []string{"data:/data"})
			s.run("p", "echo then >/data/f; sync")
			s.snapshot("snap", "data")
			s.run("p", "echo now >/data/f; sync")
			s.claim("restored", "crust-"+fs, "640Mi", "ReadWriteOnce",
				"dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}")
			s.claim("clone", "crust-"+fs, "320Mi", "ReadWriteOnce", "dataSource: {kind: PersistentVolumeClaim, name: data}")
			s.pod("q", []string{"restored:/restored", "clone:/clone"})
			if got := s.run("q", "cat /restored/f /clone/f"); got != "then\nnow" {
				t.Errorf("%q", got)
			}
			if got := s.run("q", "df -k /restored | tail -1 | awk '{print ($2 > 500*1024)}'"); got != "1" {
				t.Errorf("the restored one has %s", s.run("q", "df -k /restored"))
			}
			s.kubectl("delete", "volumesnapshot", "snap", "-n", s.ns, "--timeout=60s")
		})
	}
}

func TestGenericEphemeralVolume(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.apply(`{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {terminationGracePeriodSeconds: 1,
containers: [{name: c, image: "localhost/test/busybox:1", volumeMounts: [{name: v, mountPath: /data}]}],
volumes: [{name: v, ephemeral: {volumeClaimTemplate: {spec: {storageClassName: crust-ext4, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}}}}]}}`)
	s.ready("p")
	s.run("p", "echo x >/data/f")
	s.delete("p")
	s.until(60*time.Second, "the claim is gone with its pod", func() (string, bool) {
		got := s.kubectl("get", "pvc", "-n", s.ns, "-o", "name")
		return got, got == ""
	})
}

// A PersistentVolume names a device that somebody else made.
func TestStaticDevice(t *testing.T) {
	t.Parallel()
	s := use(t)
	device := onNode(t, "truncate -s 64M /var/lib/crust-csi/static && losetup -f --show /var/lib/crust-csi/static")
	t.Cleanup(func() { onNode(t, "losetup -d "+device+"; rm /var/lib/crust-csi/static") })
	s.apply(fmt.Sprintf(`{apiVersion: v1, kind: PersistentVolume, metadata: {name: test-static}, spec: {capacity: {storage: 64Mi}, accessModes: [ReadWriteOnce],
storageClassName: "", persistentVolumeReclaimPolicy: Retain, claimRef: {namespace: %s, name: data},
csi: {driver: %s, volumeHandle: static.disk, fsType: ext4, volumeAttributes: {device: %s}}}}`, s.ns, driver, device))
	t.Cleanup(func() { s.kubectl("delete", "pv", "test-static") })
	s.claim("data", `""`, "64Mi", "ReadWriteOnce", "volumeName: test-static")
	s.pod("p", []string{"data:/data"})
	s.run("p", "echo x >/data/f")
	if got := mountOf(t, s.target("p", "data")); !strings.Contains(got, " "+device+" ") {
		t.Errorf("%s", got)
	}
	s.delete("p")
	s.kubectl("delete", "pvc", "data", "-n", s.ns)
	s.kubectl("wait", "--for=jsonpath={.status.phase}=Released", "pv/test-static", "--timeout=30s")
	s.kubectl("patch", "pv", "test-static", "-p", `{"spec":{"claimRef":null}}`)
}

// B2: the claim's events name the error in a StorageClass.
func TestB02_AMistypedClassIsToldInTheClaimsEvents(t *testing.T) {
	t.Parallel()
	s := use(t)
	class := "mistyped-" + s.ns
	s.apply(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: ` + class + `}, provisioner: csi.crust.dev,
volumeBindingMode: WaitForFirstConsumer, parameters: {provisionning: thick}}`)
	t.Cleanup(func() { s.kubectl("delete", "storageclass", class) })
	s.claim("data", class, "64Mi", "ReadWriteOncePod")
	s.apply(podText("p", []string{"data:/data"}))
	s.until(4*time.Minute, "an event that names the parameter", func() (string, bool) {
		all := s.kubectl("get", "events", "-n", s.ns, "-o", "jsonpath={.items[*].message}")
		return all, strings.Contains(all, `parameter "provisionning" is unknown`)
	})
	s.kubectl("delete", "pod,pvc", "--all", "-n", s.ns, "--grace-period=1", "--timeout=60s")
}
