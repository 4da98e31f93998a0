package adoption

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/fake"
	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/features"
	featurestesting "k8s.io/client-go/features/testing"
	kubetesting "k8s.io/client-go/testing"
)

const (
	driverName = "csi.crust.dev"
	here       = "pool.s00000000000000000000000000000000" // a snapshot of this node
	elsewhere  = "pool.s11111111111111111111111111111111"
)

// driver has one snapshot. Like csi-node, it lists all snapshots if none is named.
type driver struct {
	csi.ControllerClient
	mu    sync.Mutex
	asked []string
	away  int // number of calls that fail
}

func (d *driver) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest, _ ...grpc.CallOption) (*csi.ListSnapshotsResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = append(d.asked, req.GetSnapshotId())
	if d.away > 0 {
		d.away--
		return nil, errors.New("away")
	}
	if id := req.GetSnapshotId(); id != "" && id != here {
		return &csi.ListSnapshotsResponse{}, nil
	}
	return &csi.ListSnapshotsResponse{Entries: []*csi.ListSnapshotsResponse_Entry{{Snapshot: &csi.Snapshot{SnapshotId: here}}}}, nil
}

// content is a VolumeSnapshotContent that was made by hand.
func content(name, driver string, handle *string, labels map[string]string) *snapshotv1.VolumeSnapshotContent {
	c := &snapshotv1.VolumeSnapshotContent{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "1", Labels: labels}}
	c.Spec.Driver, c.Spec.Source.SnapshotHandle = driver, handle
	return c
}

// adopt runs adoption over contents for some minutes, and returns the label of each.
func adopt(t *testing.T, d *driver, prepare func(*fake.Clientset), contents ...*snapshotv1.VolumeSnapshotContent) map[string]string {
	t.Helper()
	// The fake does not end the first events of a watch with a bookmark, which a reflector waits
	// for.
	featurestesting.SetFeatureDuringTest(t, features.WatchListClient, false)
	client := fake.NewSimpleClientset()
	if prepare != nil {
		prepare(client)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, Config{Snapshots: client, Controller: d, Driver: driverName, Node: "node-1", Log: slog.New(slog.DiscardHandler)})
	}()
	synctest.Wait()
	// The fake's watch ignores selectors: contents with a label come too.
	for _, c := range contents {
		if _, err := client.SnapshotV1().VolumeSnapshotContents().Create(ctx, c, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(again / 2) // each retry comes later than the previous one
	got := map[string]string{}
	for _, c := range contents {
		now, err := client.SnapshotV1().VolumeSnapshotContents().Get(ctx, c.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got[c.Name] = now.Labels[ManagedBy]
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	return got
}

// A content gets the label on the node that has its snapshot. All others are left alone.
func TestAdoption_OnlyTheNodeThatHasTheSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &driver{}
		mine, other, empty, torn, volume := here, elsewhere, "", "pool.s0000", "pool.v1"
		fromVolume := content("from-volume", driverName, nil, nil)
		fromVolume.Spec.Source.VolumeHandle = &volume
		got := adopt(t, d, nil,
			content("mine", driverName, &mine, nil),
			content("other-node", driverName, &other, nil),
			content("other-driver", "csi.example.com", &mine, nil),
			content("labelled", driverName, &mine, map[string]string{ManagedBy: "node-2"}),
			content("empty", driverName, &empty, nil),
			content("torn", driverName, &torn, nil),
			fromVolume,
		)
		for name, node := range got {
			want := ""
			switch name {
			case "mine":
				want = "node-1"
			case "labelled":
				want = "node-2"
			}
			if node != want {
				t.Errorf("%s is managed by %q, want %q", name, node, want)
			}
		}
		for _, id := range d.asked {
			if !slices.Contains([]string{here, elsewhere, torn}, id) {
				t.Errorf("the driver was asked for %q", id)
			}
		}
	})
}

// A conflict, or an unreachable driver, is retried.
func TestAdoption_IsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mine := here
		conflicts := 3
		conflict := func(c *fake.Clientset) {
			c.PrependReactor("patch", "volumesnapshotcontents", func(kubetesting.Action) (bool, runtime.Object, error) {
				if conflicts == 0 {
					return false, nil, nil
				}
				conflicts--
				return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "volumesnapshotcontents"}, "mine",
					errors.New("it was changed"))
			})
		}
		d := &driver{away: 2}
		if got := adopt(t, d, conflict, content("mine", driverName, &mine, nil)); got["mine"] != "node-1" || conflicts != 0 {
			t.Errorf("managed by %q, with %d conflicts left", got["mine"], conflicts)
		}
	})
}
