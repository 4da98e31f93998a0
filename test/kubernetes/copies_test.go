//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// 11.2: a snapshot is restored and a volume cloned on the node that has the origin, wherever their
// pod may run.
func TestFleet_CopiesAreMadeWhereTheirOriginIs(t *testing.T) {
	t.Parallel()
	for _, node := range []string{"node-2", "node-3"} {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			s := use(t)
			s.claim("data", "crust-xfs", "320Mi", "ReadWriteOnce")
			s.pod("p", []string{"data:/data"}, away(node))
			s.run("p", "echo origin >/data/f; sync")
			s.snapshot("snap", "data")
			s.claim("restored", "crust-xfs", "320Mi", "ReadWriteOnce",
				"dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}")
			s.claim("cloned", "crust-xfs", "320Mi", "ReadWriteOnce", "dataSource: {kind: PersistentVolumeClaim, name: data}")
			for _, copied := range []string{"restored", "cloned"} {
				s.apply(podText(copied, []string{copied + ":/data"}, anywhere))
			}
			for _, copied := range []string{"restored", "cloned"} {
				s.ready(copied)
				if got := s.run(copied, "cat /data/f"); got != "origin" || s.nodeOf(copied) != node {
					t.Errorf("%s has %q on %s", copied, got, s.nodeOf(copied))
				}
			}
			// A pod that cannot go there gets an event, and its claim says where the copy is.
			s.claim("stuck", "crust-xfs", "320Mi", "ReadWriteOnce",
				"dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}")
			s.apply(podText("stuck", []string{"stuck:/data"}, away("node")))
			s.said("PersistentVolumeClaim/stuck", "CopyPlaced: snapshot snap is on node "+node)
			s.said("Pod/stuck", "FailedScheduling: .*affinity")
		})
	}
}

// 11.2: the same for claims that do not wait for a pod.
func TestFleet_CopiesOfImmediateClasses(t *testing.T) {
	t.Parallel()
	s := use(t)
	t.Cleanup(func() { s.kubectl("delete", "storageclass", s.ns, "--ignore-not-found") })
	s.apply(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: ` + s.ns +
		`}, provisioner: csi.crust.dev, volumeBindingMode: Immediate}`)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"}, away("node-3"))
	s.run("p", "echo origin >/data/f; sync")
	s.snapshot("snap", "data")
	s.claim("restored", s.ns, "64Mi", "ReadWriteOnce", "dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}")
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.phase}=Bound", "pvc/restored", "--timeout=90s")
	s.pod("q", []string{"restored:/data"}, anywhere)
	if got := s.run("q", "cat /data/f"); got != "origin" || s.nodeOf("q") != "node-3" {
		t.Errorf("%q on %s", got, s.nodeOf("q"))
	}
}

// 11.2: a VolumeSnapshotContent made by hand becomes ready and can be restored.
func TestFleet_ASnapshotContentMadeByHand(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"}, away("node-2"))
	s.run("p", "echo origin >/data/f; sync")
	s.snapshot("snap", "data")
	content := s.get("volumesnapshot/snap", ".status.boundVolumeSnapshotContentName")
	handle := s.kubectl("get", "volumesnapshotcontent", content, "-o", "jsonpath={.status.snapshotHandle}")
	s.kubectl("patch", "volumesnapshotcontent", content, "--type=merge", "-p", `{"spec":{"deletionPolicy":"Retain"}}`)
	s.kubectl("delete", "volumesnapshot", "snap", "-n", s.ns, "--timeout=60s")
	s.kubectl("delete", "volumesnapshotcontent", content, "--timeout=60s")
	byHand := func(name, handle string) {
		s.apply(fmt.Sprintf(`{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshotContent, metadata: {name: %s}, spec: {deletionPolicy: Delete, driver: csi.crust.dev,
source: {snapshotHandle: %s}, volumeSnapshotRef: {name: %[1]s, namespace: %[3]s}}}
---
{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: %[1]s}, spec: {source: {volumeSnapshotContentName: %[1]s}}}`, name, handle, s.ns))
	}
	byHand(s.ns, handle)
	nobodys := "default.s0123456789abcdef0123456789abcdef"
	byHand(s.ns+"-not", nobodys)
	t.Cleanup(func() {
		s.kubectl("delete", "volumesnapshot", s.ns+"-not", "-n", s.ns, "--wait=false")
		// No snapshotter handles it, so none removes its finalizer: docs/troubleshooting.md.
		s.kubectl("patch", "volumesnapshotcontent", s.ns+"-not", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
		s.kubectl("delete", "volumesnapshotcontent", s.ns+"-not", "--ignore-not-found", "--timeout=60s")
	})
	s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.readyToUse}=true", "volumesnapshot/"+s.ns, "--timeout=90s")
	s.claim("restored", "crust-ext4", "64Mi", "ReadWriteOnce",
		"dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: "+s.ns+"}")
	s.pod("q", []string{"restored:/data"}, anywhere)
	if got := s.run("q", "cat /data/f"); got != "origin" || s.nodeOf("q") != "node-2" {
		t.Errorf("%q on %s", got, s.nodeOf("q"))
	}
	if got := s.kubectl("get", "volumesnapshotcontent", s.ns+"-not", "-o", "jsonpath={.metadata.labels}"); got != "" {
		t.Errorf("a snapshot that no node has is somebody's: %s", got)
	}
}

// B6: a volume's health problem becomes an event on its pod and on its claim.
func TestB06_ASickVolumeIsAnEvent(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"}, away("node-3"))
	// The node's disk loses the data of the volume's file: ext4 stops writing.
	dev := onThe(t, "node-3", "awk -v p="+s.target("p", "data")+" '$5 == p {print $3}' /proc/1/mountinfo")
	if !strings.Contains(dev, ":") {
		t.Fatalf("the volume's device: %q", dev)
	}
	onThe(t, "node-3", "echo 1 >/sys/fs/ext4/$(basename $(readlink /sys/dev/block/"+dev+"))/trigger_fs_error")
	begin := time.Now()
	// csi-steward checks once a minute.
	s.saidWithin(3*time.Minute, "Pod/p", ": volume pvc-.*ext4")
	s.saidWithin(3*time.Minute, "PersistentVolumeClaim/data", ": volume pvc-.*ext4")
	t.Logf("seen after %s", time.Since(begin).Round(time.Second))
}
