package placement

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	snapshots "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/fake"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
)

// A provisioner whose node is full removes the annotation. The claim gets it again, but later each
// time: otherwise the two would write to the API server as fast as they can. (TestFleet_Copies* in
// test/kubernetes test a real cluster.)
func TestFleet_AClaimThatIsGivenBackWaits(t *testing.T) {
	class, node := "crust", "node-1"
	group := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "ns", Name: name} }
	client := fake.NewClientset(
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Provisioner: "csi.crust.dev"},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}},
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
			ClaimRef:               &corev1.ObjectReference{Namespace: "ns", Name: "origin"},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.crust.dev"}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: "topology.csi.crust.dev/node", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}}}},
		&corev1.PersistentVolumeClaim{ObjectMeta: group("origin"), Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}},
		&corev1.PersistentVolumeClaim{ObjectMeta: group("copy"), Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, DataSourceRef: &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "origin"}}},
	)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- New(Config{Client: client, Snapshots: snapshots.NewSimpleClientset(), Driver: "csi.crust.dev",
			Events: record.NewFakeRecorder(100), Log: slog.New(slog.DiscardHandler)}).Run(ctx)
	}()
	claims := client.CoreV1().PersistentVolumeClaims("ns")
	var waited []time.Duration
	for begin := time.Now(); len(waited) < 3; {
		var claim *corev1.PersistentVolumeClaim
		for {
			var err error
			if claim, err = claims.Get(ctx, "copy", metav1.GetOptions{}); err != nil {
				t.Fatal(err)
			}
			if claim.Annotations[selectedNode] == node {
				break
			}
			if time.Since(begin) > time.Minute {
				t.Fatalf("the claim gets no node, after %v", waited)
			}
			time.Sleep(10 * time.Millisecond)
		}
		waited = append(waited, time.Since(begin))
		delete(claim.Annotations, selectedNode)
		begin = time.Now() // the update may be observed before it returns
		if _, err := claims.Update(ctx, claim, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	<-ended
	if waited[1] < 2*time.Second || waited[2] < 4*time.Second {
		t.Errorf("the claim got its node again after %v", waited)
	}
}

// A copy is not made on a cordoned node, nor of a missing origin: neither is an error that is
// logged at each try.
func TestFleet_ACopyWaitsForItsNodeAndItsOrigin(t *testing.T) {
	client := fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Spec: corev1.NodeSpec{Unschedulable: true}},
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
			ClaimRef:               &corev1.ObjectReference{Namespace: "ns", Name: "origin"},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.crust.dev"}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: "topology.csi.crust.dev/node", Operator: corev1.NodeSelectorOpIn, Values: []string{"node-1"}}}}}}}}},
		&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "origin"},
			Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}},
	)
	events := record.NewFakeRecorder(100)
	c := New(Config{Client: client, Snapshots: snapshots.NewSimpleClientset(), Driver: "csi.crust.dev", Events: events,
		Log: slog.New(slog.DiscardHandler)})
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "crust"}, Provisioner: "csi.crust.dev"}
	known := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	if err := known.Add(class); err != nil {
		t.Fatal(err)
	}
	c.classes = storagelisters.NewStorageClassLister(known)
	for kind, name := range map[string]string{"PersistentVolumeClaim": "origin", "VolumeSnapshot": "never"} {
		group := ""
		if kind == "VolumeSnapshot" {
			group = "snapshot.storage.k8s.io"
		}
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "copy"},
			Spec: corev1.PersistentVolumeClaimSpec{
				StorageClassName: &class.Name, DataSourceRef: &corev1.TypedObjectReference{APIGroup: &group, Kind: kind, Name: name}}}
		if err := c.place(t.Context(), claim); !errors.Is(err, errNotYet) {
			t.Errorf("a copy of %s %s: %v", kind, name, err)
		}
	}
	select {
	case said := <-events.Events:
		if !strings.Contains(said, "OriginCordoned") || !strings.Contains(said, "node-1, which is cordoned") {
			t.Error(said)
		}
	default:
		t.Error("no event says that the node is cordoned")
	}
}
