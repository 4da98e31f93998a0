package placement

import (
	"context"
	"log/slog"
	"testing"
	"time"

	snapshots "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/fake"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
)

// A provisioner whose node has no room takes the annotation off. The claim gets it again, but later each time: the two would
// write to the API server as fast as they can. (test/kubernetes has what a cluster does: TestFleet_Copies*.)
func TestFleet_AClaimThatIsGivenBackWaits(t *testing.T) {
	class, node := "crust", "node-1"
	group := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "ns", Name: name} }
	client := fake.NewClientset(
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Provisioner: "csi.crust.dev"},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}},
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.crust.dev"}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
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
	for len(waited) < 3 {
		begin := time.Now()
		var claim *corev1.PersistentVolumeClaim
		for {
			var err error
			if claim, err = claims.Get(ctx, "copy", metav1.GetOptions{}); err != nil {
				t.Fatal(err)
			}
			if claim.Annotations[selectedNode] == node {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		waited = append(waited, time.Since(begin))
		delete(claim.Annotations, selectedNode)
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
