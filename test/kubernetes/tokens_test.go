//go:build kubernetes

package kubernetes_test

import (
	"strings"
	"testing"
)

// A09: the resizer's token, which is on one node, writes sizes of this driver's volumes and claims, and nothing else.
func TestA09_TheResizersTokenWritesSizes(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"})
	s.apply(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: others, annotations: {volume.kubernetes.io/storage-provisioner: other.example}},
spec: {storageClassName: of-another-driver, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}`)
	token := s.kubectl("create", "token", "csi-resizer", "-n", system)
	pv := s.get("pvc/data", ".spec.volumeName")
	claims := "/api/v1/namespaces/" + s.ns + "/persistentvolumeclaims/"
	if err := s.does(token, "", "patch", "pv", pv, "-p", `{"spec":{"capacity":{"storage":"128Mi"}}}`); err != nil {
		t.Errorf("what a resizer does is refused: %v", err)
	}
	if err := s.asks(token, "PATCH", claims+"data/status", `{"status":{"capacity":{"storage":"128Mi"}}}`); err != nil {
		t.Errorf("what a resizer does is refused: %v", err)
	}
	s.denied(s.asks(token, "PATCH", claims+"data/status", `{"status":{"phase":"Lost"}}`),
		"ValidatingAdmissionPolicy 'crust-csi-claim-status'", "phase")
	for _, metadata := range []string{
		`{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"gone","uid":"6d3ff0b1-0000-4000-8000-3f7c9a2d5b11"}]}`,
		`{"finalizers":null}`, `{"labels":{"a":"b"}}`, `{"annotations":{"a":"b"}}`,
	} {
		s.denied(s.asks(token, "PATCH", claims+"data/status", `{"metadata":`+metadata+`}`),
			"ValidatingAdmissionPolicy 'crust-csi-claim-status'", "only its status")
	}
	s.denied(s.asks(token, "PATCH", claims+"others/status", `{"status":{"capacity":{"storage":"1Gi"}}}`),
		"ValidatingAdmissionPolicy 'crust-csi-claim-status'", "another driver")
	const policy = "ValidatingAdmissionPolicy 'crust-csi-sizes'"
	for _, patch := range []string{
		`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"gone","uid":"6d3ff0b1-0000-4000-8000-3f7c9a2d5b11"}]}}`,
		`{"metadata":{"finalizers":null}}`, `{"metadata":{"labels":{"a":"b"}}}`,
		`{"metadata":{"annotations":{"pv.kubernetes.io/provisioned-by":"x"}}}`, `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`,
		`{"spec":{"claimRef":{"name":"stolen"}}}`, `{"spec":{"mountOptions":["context=x"]}}`, `{"spec":{"storageClassName":"another"}}`,
	} {
		s.denied(s.does(token, "", "patch", "pv", pv, "-p", patch), policy, "only the volume's capacity")
	}
	for _, argv := range [][]string{{"get", "secrets", "-A"}, {"get", "pods", "-A"}, {"delete", "--dry-run=server", "pv", pv},
		{"delete", "--dry-run=server", "pvc", "data", "-n", s.ns}} {
		if _, err := s.try(append([]string{"--token", token}, argv...)...); err == nil || !strings.Contains(err.Error(), "forbidden") {
			t.Errorf("%v: %v", argv, err)
		}
	}
}

// A09: the steward's token chooses a node for a copy that has none, and does nothing else.
func TestA09_TheStewardsTokenPlacesCopies(t *testing.T) {
	t.Parallel()
	s := use(t)
	s.claim("data", "crust-ext4", "64Mi", "ReadWriteOnce")
	s.pod("p", []string{"data:/data"})
	// Nobody makes these, because their origin does not exist.
	copied := "dataSource: {kind: PersistentVolumeClaim, name: none}"
	s.claim("waits", "crust-ext4", "64Mi", "ReadWriteOnce", copied)
	s.apply(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: others, annotations: {volume.kubernetes.io/storage-provisioner: other.example}},
spec: {storageClassName: of-another-driver, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}, ` + copied + `}}`)
	token := s.kubectl("create", "token", "csi-steward", "-n", system)
	const policy, place = "ValidatingAdmissionPolicy 'crust-csi-placement'",
		`{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":"node-2"}}}`
	patch := func(claim, patch string) error {
		return s.does(token, "", "patch", "pvc", claim, "-n", s.ns, "-p", patch)
	}
	if err := patch("waits", place); err != nil {
		t.Errorf("what the steward does is refused: %v", err)
	}
	s.denied(patch("data", place), policy, "not a copy")
	s.denied(patch("others", place), policy, "not a copy")
	for _, p := range []string{
		`{"metadata":{"finalizers":["a.b/c"]}}`, `{"metadata":{"labels":{"a":"b"}}}`, `{"metadata":{"annotations":{"a":"b"}}}`,
		`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"gone","uid":"6d3ff0b1-0000-4000-8000-3f7c9a2d5b11"}]}}`,
	} {
		s.denied(patch("waits", p), policy)
	}
	for _, argv := range [][]string{{"get", "secrets", "-A"}, {"get", "pods", "-A"},
		{"delete", "--dry-run=server", "pvc", "data", "-n", s.ns}} {
		if _, err := s.try(append([]string{"--token", token}, argv...)...); err == nil || !strings.Contains(err.Error(), "forbidden") {
			t.Errorf("%v: %v", argv, err)
		}
	}
}
