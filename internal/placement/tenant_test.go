package placement

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	snapshots "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/fake"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/features"
	featurestesting "k8s.io/client-go/features/testing"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
)

func pvc(name, class, volume, kind, origin string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: name, UID: "uid-" + "x"},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class, VolumeName: volume}}
	if origin != "" {
		group := ""
		if kind == "VolumeSnapshot" {
			group = "snapshot.storage.k8s.io"
		}
		c.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: &group, Kind: kind, Name: origin}
	}
	return c
}

// api answers as an API server that has no such object: 431 if the request's first line is larger than 1 MiB.
type api struct{}

func (api) RoundTrip(r *http.Request) (*http.Response, error) {
	code, body := 404, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":"not found"}`
	if len(r.URL.EscapedPath()) > 1<<20 {
		code, body = 431, "431 Request Header Fields Too Large"
	}
	return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader(body)),
		Header: http.Header{"Content-Type": {"application/json"}}, Request: r}, nil
}

// What a tenant can write into a claim, and how much csi-steward logs of it in an hour.
func TestA09_ATenantFillsNoLog(t *testing.T) {
	for name, claims := range map[string][]runtime.Object{
		"a class that does not exist":    {pvc("copy", "no-such-class", "", "VolumeSnapshot", "s")},
		"no class, on purpose":           {pvc("copy", "", "", "VolumeSnapshot", "s")},
		"a name that no object can have": {pvc("copy", "crust", "", "VolumeSnapshot", "a/b")},
		"a name of 400 KiB":              {pvc("copy", "crust", "", "VolumeSnapshot", strings.Repeat("\n", 400<<10))},
		"an origin whose volume does not exist": {pvc("copy", "crust", "", "PersistentVolumeClaim", "o"),
			pvc("o", "crust", "none", "", "")},
		"an origin whose volume has an odd name": {pvc("copy", "crust", "", "PersistentVolumeClaim", "o"),
			pvc("o", "crust", "../x", "", "")},
		"(control) a snapshot that does not exist": {pvc("copy", "crust", "", "VolumeSnapshot", "s")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				featurestesting.SetFeatureDuringTest(t, features.WatchListClient, false)
				real, err := snapshotclient.NewForConfig(&rest.Config{Host: "http://api.example", Transport: api{}})
				if err != nil {
					t.Fatal(err)
				}
				class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "crust"}, Provisioner: "csi.crust.dev"}
				client := fake.NewClientset(append(claims, class)...)
				var log bytes.Buffer
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() {
					ended <- New(Config{Client: client, Snapshots: real, Driver: "csi.crust.dev", Events: record.NewFakeRecorder(1000),
						Log: slog.New(slog.NewTextHandler(&log, nil))}).Run(ctx)
				}()
				time.Sleep(time.Hour)
				cancel()
				<-ended
				if n := strings.Count(log.String(), "\n"); n > 2 {
					t.Errorf("%d lines, %d KiB in an hour, as %.300s", n, log.Len()>>10, log.String())
				}
			})
		})
	}
}

// A tenant's claim names another tenant's volume in spec.volumeName, and is not bound to it. A copy of this claim tells the tenant on which
// node the other tenant's volume is.
func TestA09_AClaimThatIsNotBoundTellsNothing(t *testing.T) {
	victim := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-victim"}, Spec: corev1.PersistentVolumeSpec{
		ClaimRef:               &corev1.ObjectReference{Namespace: "victim", Name: "data", UID: "uid-victim"},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.crust.dev"}},
		NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "topology.csi.crust.dev/node", Operator: corev1.NodeSelectorOpIn, Values: []string{"secret-node"}}}}}}}}}
	origin := pvc("origin", "crust", "pvc-victim", "", "")
	origin.Status.Phase = corev1.ClaimPending
	client := fake.NewClientset(victim, origin, pvc("copy", "crust", "", "PersistentVolumeClaim", "origin"),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "secret-node"}},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "crust"}, Provisioner: "csi.crust.dev"})
	events := record.NewFakeRecorder(10)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_ = New(Config{Client: client, Snapshots: snapshots.NewSimpleClientset(), Driver: "csi.crust.dev", Events: events,
		Log: slog.New(slog.DiscardHandler)}).Run(ctx)
	for len(events.Events) > 0 {
		if e := <-events.Events; strings.Contains(e, "secret-node") {
			t.Errorf("the tenant reads: %s", e)
		}
	}
}

// A tenant makes a thousand claims whose snapshot does not exist, more than csi-steward may ask for. Another tenant's copy is placed at
// once.
func TestA09_ATenantDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		featurestesting.SetFeatureDuringTest(t, features.WatchListClient, false)
		limited, err := snapshotclient.NewForConfig(&rest.Config{Host: "http://api.example", Transport: api{}, QPS: 5, Burst: 10})
		if err != nil {
			t.Fatal(err)
		}
		node := "node-1"
		origin := pvc("origin", "crust", "pv", "", "")
		objects := []runtime.Object{
			&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "crust"}, Provisioner: "csi.crust.dev"},
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}},
			&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
				ClaimRef:               &corev1.ObjectReference{Namespace: "victim", Name: "origin", UID: origin.UID},
				PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.crust.dev"}},
				NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
					MatchExpressions: []corev1.NodeSelectorRequirement{
						{Key: "topology.csi.crust.dev/node", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}}}},
		}
		for i := range 1000 {
			objects = append(objects, pvc(fmt.Sprint("copy-", i), "crust", "", "VolumeSnapshot", "missing"))
		}
		client := fake.NewClientset(objects...)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- New(Config{Client: client, Snapshots: limited, Driver: "csi.crust.dev", Events: record.NewFakeRecorder(10),
				Log: slog.New(slog.DiscardHandler)}).Run(ctx)
		}()
		time.Sleep(time.Minute)
		victims := client.CoreV1().PersistentVolumeClaims("victim")
		begin := time.Now()
		for _, claim := range []*corev1.PersistentVolumeClaim{origin, pvc("copy", "crust", "", "PersistentVolumeClaim", "origin")} {
			claim.Namespace = "victim"
			if _, err := victims.Create(ctx, claim, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		for chosen := ""; chosen == ""; time.Sleep(100 * time.Millisecond) {
			claim, err := victims.Get(ctx, "copy", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			chosen = claim.Annotations[selectedNode]
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("the other tenant's copy was placed after %s", took)
		}
		cancel()
		<-ended
	})
}
