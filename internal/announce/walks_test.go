package announce

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/inventory"
)

// teller returns an Announcer whose events a test reads.
func teller(t *testing.T, d *driver) (said func(now time.Time) []string) {
	t.Helper()
	client := fake.NewClientset(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim-a", UID: "u"},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv-a"}})
	events := record.NewFakeRecorder(100)
	events.IncludeObject = true
	a := New(Config{Client: client, Inventory: d, Health: d, Events: events, Log: slog.New(slog.DiscardHandler)})
	return func(now time.Time) []string {
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
}

// 11.5: a long walk is reported to the pod a few times, not once a minute, and so is its end.
func TestEvents_AWalkIsToldOfAFewTimes(t *testing.T) {
	start := time.Now()
	w := &inventory.Walk{Volume: "a", Name: "pv-a", Pod: "ns/p", PodUid: "uid-p", Since: timestamppb.New(start),
		Progress: "7 files looked at"}
	d := &driver{walks: []*inventory.Walk{w, {Volume: "b", Since: w.Since, Progress: "of a pod that the kubelet does not name"}}}
	said := teller(t, d)
	if got := said(start.Add(longWalk - time.Second)); len(got) != 0 {
		t.Errorf("of a short walk: %q", got)
	}
	var at []time.Duration
	var all []string
	for after := time.Minute; after <= 5*time.Hour; after += time.Minute {
		if got := said(start.Add(after)); len(got) > 0 {
			at, all = append(at, after), append(all, got...)
		}
	}
	want := []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute, 8 * time.Minute, 16 * time.Minute, 32 * time.Minute,
		64 * time.Minute, 124 * time.Minute, 184 * time.Minute, 244 * time.Minute}
	if len(at) != len(want) || len(all) != len(want) {
		t.Fatalf("said after %s: %q", at, all)
	}
	for i := range want {
		if at[i] != want[i] {
			t.Errorf("said after %s, not after %s", at[i], want[i])
		}
	}
	if want := "Normal GroupChangeRuns volume pv-a: its files are being given to the pod's fsGroup for 1m0s, " +
		"and the pod starts when that is done: 7 files looked at"; !strings.HasPrefix(all[0], want) ||
		!strings.Contains(all[0], "kind=Pod") {
		t.Errorf("%q, not %q", all[0], want)
	}
	w.Ended, w.Progress = timestamppb.New(start.Add(301*time.Minute)), "9 files looked at"
	got := said(start.Add(302 * time.Minute))
	if len(got) != 1 || !strings.HasPrefix(got[0],
		"Normal GroupChangeDone volume pv-a: its files were given to the pod's fsGroup within 5h1m0s: 9 files") {
		t.Errorf("at its end: %q", got)
	}
	if got := said(start.Add(303 * time.Minute)); len(got) != 0 {
		t.Errorf("once more: %q", got)
	}
}

// The end of an unreported walk is not reported; a failed walk is reported as failed.
func TestEvents_TheEndOfAWalk(t *testing.T) {
	start := time.Now()
	short := &inventory.Walk{Volume: "a", Name: "pv-a", Pod: "ns/p", PodUid: "uid-p", Since: timestamppb.New(start),
		Ended: timestamppb.New(start.Add(time.Second))}
	long := &inventory.Walk{Volume: "b", Pod: "ns/q", PodUid: "uid-q", Since: timestamppb.New(start)}
	d := &driver{walks: []*inventory.Walk{short, long}}
	said := teller(t, d)
	if got := said(start.Add(time.Minute)); len(got) != 1 || !strings.Contains(got[0], "GroupChangeRuns volume b:") {
		t.Errorf("%q", got)
	}
	// The driver does not report walks: nothing is forgotten.
	for _, d.refuses = range []error{status.Error(codes.Unimplemented, "an earlier version"), status.Error(codes.Unavailable, "away")} {
		if got := said(start.Add(61 * time.Second)); len(got) != 0 {
			t.Errorf("%s: %q", d.refuses, got)
		}
	}
	d.refuses = nil
	long.Ended, long.Failed = timestamppb.New(start.Add(2*time.Minute)), true
	if got := said(start.Add(2 * time.Minute)); len(got) != 1 || !strings.HasPrefix(got[0], "Warning GroupChangeFailed volume b: ") {
		t.Errorf("%q", got)
	}
}

// 11.5: waiting growth is reported on the pod and the claim, once, after it has lasted. It also
// occurs for a moment whenever a volume grows.
func TestEvents_GrowthThatWaits(t *testing.T) {
	start := time.Now()
	v := &inventory.Volume{Id: "a", Name: "pv-a", Claim: "ns/claim-a", Uses: []*inventory.Use{{Pod: "ns/p", PodUid: "uid-p"}}}
	waits := []*inventory.Notice{{Reason: "GrowthWaits", Message: "end its pods"}}
	d := &driver{volumes: []*inventory.Volume{v}}
	said := teller(t, d)
	v.Notices = waits
	if got := said(start); len(got) != 0 {
		t.Errorf("at once: %q", got)
	}
	v.Notices = nil
	said(start.Add(time.Minute))
	v.Notices = waits
	if got := said(start.Add(2 * time.Minute)); len(got) != 0 {
		t.Errorf("of another growth, at once: %q", got)
	}
	got := said(start.Add(3 * time.Minute))
	if len(got) != 2 || !strings.HasPrefix(got[0], "Warning GrowthWaits volume pv-a: end its pods") ||
		!strings.Contains(got[0], "kind=Pod") ||
		!strings.Contains(got[1], "kind=PersistentVolumeClaim") {
		t.Fatalf("of the pod and its claim: %q", got)
	}
	if got := said(start.Add(4 * time.Minute)); len(got) != 0 {
		t.Errorf("again: %q", got)
	}
}
