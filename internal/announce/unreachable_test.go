package announce

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/inventory"
)

func sickVolume(uses ...*inventory.Use) *driver {
	return &driver{volumes: []*inventory.Volume{{Id: "a", Name: "pv-a", Claim: "ns/claim-a", Uses: uses}},
		sick: map[string][]*csi.VolumeHealth_VolumeHealthEntry{"a": {{Status: csi.VolumeHealthErrorType_DATA_LOSS, Reason: "WritesLost"}}}}
}

// After a restart of csi-node, with the publish no longer in the audit log (5 files of 8 MiB, or the state directory was lost), a use
// has no pod. The claim is known, so its event tells that data was lost.
func TestD11_AUseWithoutAPodIsTheClaims(t *testing.T) {
	d := sickVolume(&inventory.Use{Target: "/var/lib/kubelet/pods/0f2c/volumes/kubernetes.io~csi/pv-a/mount"})
	said := teller(t, d)
	start := time.Now()
	var all []string
	for i := range 180 {
		all = append(all, said(start.Add(time.Duration(i)*time.Minute))...)
	}
	if len(all) == 0 {
		t.Error("in three hours, no event about lost writes, not even on the claim")
	}
}

// The API server refuses the one read of the claim (500 while etcd elects a leader, 429, 403, a time-out).
func TestD11_TheClaimsEventIsTriedAgain(t *testing.T) {
	d := sickVolume(&inventory.Use{Pod: "ns/p", PodUid: "uid-p"})
	client := fake.NewClientset(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim-a", UID: "u"},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv-a"}})
	once := true
	client.PrependReactor("get", "persistentvolumeclaims", func(kubetesting.Action) (bool, runtime.Object, error) {
		if once {
			once = false
			return true, nil, apierrors.NewInternalError(errors.New("etcdserver: leader changed"))
		}
		return false, nil, nil
	})
	events := record.NewFakeRecorder(100)
	events.IncludeObject = true
	a := New(Config{Client: client, Inventory: d, Health: d, Events: events, Log: slog.New(slog.DiscardHandler)})
	start := time.Now()
	for i := range 59 {
		if err := a.Look(t.Context(), start.Add(time.Duration(i)*time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	for len(events.Events) > 0 {
		if strings.Contains(<-events.Events, "kind=PersistentVolumeClaim") {
			return
		}
	}
	t.Error("59 looks later the claim has no event yet")
}

type blackHole struct{}

func (blackHole) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// The API server is behind a partition, and a pool with 40 volumes in use is away: one Look takes 20 minutes, and meanwhile csi-node is
// not asked for health (which thaws what is frozen) and no other event is made.
func TestD11_AnAPIServerThatHangsHoldsUpNoLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api.example", Transport: blackHole{}})
		if err != nil {
			t.Fatal(err)
		}
		d := &driver{sick: map[string][]*csi.VolumeHealth_VolumeHealthEntry{}}
		all := &oneAnswer{driver: d}
		for i := range 40 {
			id := fmt.Sprintf("v%02d", i)
			all.volumes = append(all.volumes, &inventory.Volume{Id: id, Name: id, Claim: "ns/" + id,
				Uses: []*inventory.Use{{Pod: "ns/" + id, PodUid: id}}})
			d.sick[id] = []*csi.VolumeHealth_VolumeHealthEntry{{Status: csi.VolumeHealthErrorType_DEGRADED, Reason: "PoolIsAway"}}
		}
		a := New(Config{Client: client, Inventory: all, Health: d, Events: record.NewFakeRecorder(1000),
			Log: slog.New(slog.DiscardHandler)})
		begin := time.Now()
		_ = a.Look(t.Context(), begin)
		if took := time.Since(begin); took > 2*every {
			t.Errorf("one look took %s", took)
		}
	})
}

// The API server refuses the read of one claim for good: 500 for an object that it cannot decode, 403, or a name that no object can have.
// The claims after it have their events.
func TestD11_AClaimThatCannotBeReadSilencesNoOther(t *testing.T) {
	for name, refused := range map[string]error{
		"500":        apierrors.NewInternalError(errors.New("unable to decode")),
		"403":        apierrors.NewForbidden(corev1.Resource("persistentvolumeclaims"), "claim-a", errors.New("by a rule")),
		"a bad name": errors.New(`invalid resource name "a/b"`),
	} {
		t.Run(name, func(t *testing.T) {
			d := sickVolume(&inventory.Use{Pod: "ns/p", PodUid: "uid-p"})
			d.volumes = append(d.volumes, &inventory.Volume{Id: "c", Name: "pv-c", Claim: "ns/claim-c",
				Uses: []*inventory.Use{{Pod: "ns/q", PodUid: "uid-q"}}})
			d.sick["c"] = d.sick["a"]
			client := fake.NewClientset(&corev1.PersistentVolumeClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim-c", UID: "u"},
				Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv-c"}})
			client.PrependReactor("get", "persistentvolumeclaims", func(action kubetesting.Action) (bool, runtime.Object, error) {
				return action.(kubetesting.GetAction).GetName() == "claim-a", nil, refused
			})
			events := record.NewFakeRecorder(100)
			events.IncludeObject = true
			a := New(Config{Client: client, Inventory: d, Health: d, Events: events, Log: slog.New(slog.DiscardHandler)})
			if err := a.Look(t.Context(), time.Now()); err != nil {
				t.Fatal(err)
			}
			for len(events.Events) > 0 {
				if strings.Contains(<-events.Events, "kind=PersistentVolumeClaim") {
					return
				}
			}
			t.Error("the other claim has no event")
		})
	}
}
