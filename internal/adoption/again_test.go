package adoption

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/fake"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/features"
	featurestesting "k8s.io/client-go/features/testing"
)

// The driver is away (csi-node restarts) while an administrator makes a content, deletes it, and makes another of that name.
func TestFleet_AContentThatIsAnotherByNow(t *testing.T) {
	mine, empty := here, ""
	for name, again := range map[string]func(c *snapshotv1.VolumeSnapshotContent){
		"of a volume": func(c *snapshotv1.VolumeSnapshotContent) {
			c.Spec.Source.SnapshotHandle, c.Spec.Source.VolumeHandle = nil, &mine
		},
		"of another driver": func(c *snapshotv1.VolumeSnapshotContent) { c.Spec.Driver = "other.example" },
		"of another driver, with an empty handle": func(c *snapshotv1.VolumeSnapshotContent) {
			c.Spec.Driver, c.Spec.Source.SnapshotHandle = "other.example", &empty
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				featurestesting.SetFeatureDuringTest(t, features.WatchListClient, false)
				client, d := fake.NewSimpleClientset(), &driver{away: 1}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan any, 1)
				go func() {
					defer func() { ended <- recover() }()
					_ = Run(ctx, Config{Snapshots: client, Controller: d, Driver: driverName, Node: "node-1",
						Log: slog.New(slog.DiscardHandler)})
				}()
				synctest.Wait()
				contents := client.SnapshotV1().VolumeSnapshotContents()
				if _, err := contents.Create(ctx, content("x", driverName, &mine, nil), metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
				synctest.Wait() // the driver was away: it is tried again in a second
				if err := contents.Delete(ctx, "x", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				c := content("x", driverName, &mine, nil)
				again(c)
				if _, err := contents.Create(ctx, c, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Second)
				now, err := contents.Get(ctx, "x", metav1.GetOptions{})
				if err != nil || now.Labels[ManagedBy] != "" {
					t.Errorf("labelled %v, %v", now.Labels, err)
				}
				cancel()
				if p := <-ended; p != nil {
					t.Errorf("csi-steward crashes: %v", p)
				}
			})
		})
	}
}
