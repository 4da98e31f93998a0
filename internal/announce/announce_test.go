package announce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/inventory"
)

// driver answers with what a test put into it, one volume per page.
type driver struct {
	inventory.InventoryClient
	csi.NodeClient
	volumes []*inventory.Volume
	sick    map[string][]*csi.VolumeHealth_VolumeHealthEntry
	hangs   map[string]bool
	away    error
	walks   []*inventory.Walk
	refuses error // error of calls about walks
}

func (d *driver) DescribeOperations(context.Context, *inventory.DescribeOperationsRequest,
	...grpc.CallOption) (*inventory.DescribeOperationsResponse, error) {
	if err := cmp.Or(d.refuses, d.away); err != nil {
		return nil, err // as gRPC does
	}
	return &inventory.DescribeOperationsResponse{Walks: d.walks}, nil
}

func (d *driver) DescribeVolumes(_ context.Context, req *inventory.DescribeVolumesRequest,
	_ ...grpc.CallOption) (*inventory.DescribeVolumesResponse, error) {
	i := slices.IndexFunc(d.volumes, func(v *inventory.Volume) bool { return v.Id > req.GetAfter() })
	if i < 0 || d.away != nil {
		return &inventory.DescribeVolumesResponse{}, d.away
	}
	resp := &inventory.DescribeVolumesResponse{Volumes: d.volumes[i : i+1]}
	if i+1 < len(d.volumes) {
		resp.After = d.volumes[i].Id
	}
	return resp, nil
}

func (d *driver) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest,
	_ ...grpc.CallOption) (*csi.NodeGetVolumeHealthResponse, error) {
	if d.hangs[req.GetVolumeId()] {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if req.GetVolumeId() == "b" {
		return nil, errors.New("deleted just now")
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: req.GetVolumeId(),
		HealthStatuses: d.sick[req.GetVolumeId()]}}, nil
}

// B6: problems of all volumes that pods use are reported once, and again after an hour or when they
// return.
func TestB06_WhatIsWrongIsSaidOnce(t *testing.T) {
	used := func(id, pod string) *inventory.Volume {
		return &inventory.Volume{Id: id, Name: "pv-" + id, Claim: "ns/claim-" + id,
			Uses: []*inventory.Use{{Pod: pod, PodUid: "uid-" + pod}}}
	}
	entry := func(reason string, kind csi.VolumeHealthErrorType) *csi.VolumeHealth_VolumeHealthEntry {
		return &csi.VolumeHealth_VolumeHealthEntry{Status: kind, Reason: reason, Message: "bad\x1b[31m words"}
	}
	d := &driver{
		volumes: []*inventory.Volume{used("a", "ns/p"), used("b", "ns/q"), used("c", "ns/r"), {Id: "d", Name: "pv-d"}},
		sick: map[string][]*csi.VolumeHealth_VolumeHealthEntry{
			"c": {
				entry("PoolNearlyFull", csi.VolumeHealthErrorType_DEGRADED),
				entry("DeferredToRuntime", csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE),
			},
			"d": {entry("PoolNearlyFull", csi.VolumeHealthErrorType_DEGRADED)},
		},
	}
	client := fake.NewClientset(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim-c", UID: "u"},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv-c"}})
	events := record.NewFakeRecorder(100)
	events.IncludeObject = true
	a := New(Config{Client: client, Inventory: d, Health: d, Events: events, Log: slog.New(slog.DiscardHandler)})
	said := func(now time.Time) []string {
		t.Helper()
		if err := a.Look(t.Context(), now); err != nil {
			t.Fatal(err)
		}
		var all []string
		for len(events.Events) > 0 {
			all = append(all, <-events.Events)
		}
		return all
	}
	start := time.Now()
	got := said(start)
	if len(got) != 2 || !strings.Contains(got[0], "kind=Pod") || !strings.Contains(got[1], "kind=PersistentVolumeClaim") {
		t.Fatalf("of the pod and of its claim: %q", got)
	}
	if want := `Warning PoolNearlyFull volume pv-c: bad\x1b[31m words`; !strings.HasPrefix(got[0], want) {
		t.Errorf("%q, not %q", got[0], want)
	}
	if got := said(start.Add(59 * time.Minute)); len(got) != 0 {
		t.Errorf("again within the hour: %q", got)
	}
	if got := said(start.Add(61 * time.Minute)); len(got) != 2 {
		t.Errorf("after an hour: %q", got)
	}
	sick := d.sick
	d.sick = nil
	if got := said(start.Add(62 * time.Minute)); len(got) != 0 {
		t.Errorf("of volumes that are well: %q", got)
	}
	d.sick = sick
	if got := said(start.Add(63 * time.Minute)); len(got) != 2 {
		t.Errorf("when it comes back: %q", got)
	}
	// The claim is a different object by now.
	client.CoreV1().PersistentVolumeClaims("ns").Delete(t.Context(), "claim-c", metav1.DeleteOptions{})
	if got := said(start.Add(3 * time.Hour)); len(got) != 1 {
		t.Errorf("of a claim that is gone: %q", got)
	}
	another := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim-c", UID: "v"},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv-other"}}
	if _, err := client.CoreV1().PersistentVolumeClaims("ns").Create(t.Context(), another, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := said(start.Add(5 * time.Hour)); len(got) != 1 {
		t.Errorf("of another claim of that name: %q", got)
	}
	// Nothing is known meanwhile, so nothing is forgotten.
	d.away = errors.New("away")
	if err := a.Look(t.Context(), start.Add(6*time.Hour)); err == nil {
		t.Error("the driver is away")
	}
	d.away = nil
	if got := said(start.Add(5*time.Hour + time.Minute)); len(got) != 0 {
		t.Errorf("after the driver was away: %q", got)
	}
}

// Volumes that hang, more than are queried in parallel, delay no other for long. A problem is not
// reported again because its volume hung meanwhile.
func TestB06_AVolumeThatHangsDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &driver{sick: map[string][]*csi.VolumeHealth_VolumeHealthEntry{}, hangs: map[string]bool{}}
		all := &oneAnswer{driver: d}
		for i := range atOnce + 2 {
			id := fmt.Sprintf("v%02d", i)
			all.volumes = append(all.volumes, &inventory.Volume{Id: id, Name: id, Uses: []*inventory.Use{{Pod: "ns/" + id, PodUid: id}}})
			d.sick[id] = []*csi.VolumeHealth_VolumeHealthEntry{{Status: csi.VolumeHealthErrorType_DEGRADED, Reason: "Torn"}}
			d.hangs[id] = i <= atOnce // all but the last
		}
		events := record.NewFakeRecorder(100)
		a := New(Config{Client: fake.NewClientset(), Inventory: all, Health: d, Events: events, Log: slog.New(slog.DiscardHandler)})
		said := func(want int) {
			t.Helper()
			begin := time.Now()
			if err := a.Look(t.Context(), begin); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(begin); took > 2*patience {
				t.Errorf("the look took %s", took)
			}
			if n := len(events.Events); n != want {
				t.Errorf("%d events, want %d", n, want)
			}
			for len(events.Events) > 0 {
				<-events.Events
			}
		}
		said(1)
		clear(d.hangs)
		said(atOnce + 1)
		d.hangs["v00"] = true
		said(0)
		clear(d.hangs)
		said(0)
	})
}

// oneAnswer returns all volumes on one page.
type oneAnswer struct {
	*driver
	volumes []*inventory.Volume
}

func (d *oneAnswer) DescribeVolumes(context.Context, *inventory.DescribeVolumesRequest,
	...grpc.CallOption) (*inventory.DescribeVolumesResponse, error) {
	return &inventory.DescribeVolumesResponse{Volumes: d.volumes}, nil
}
