package orchestrator

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/internal/plain"
)

// A runtime's text, and so a guest's, reaches the kubelet and a pod's events as plain text.
func TestALow_EventsHavePlainWords(t *testing.T) {
	for _, failing := range []string{"RuntimeGetCapabilities", "RuntimePublishVolume"} {
		t.Run(failing, func(t *testing.T) {
			r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
			r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
				if call == failing {
					return status.Error(codes.Internal, "no room \x1b[2J\u202egnp.exe")
				}
				return nil
			}
			_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
			if failing == "RuntimePublishVolume" {
				ok(t, err)
				// A slow machine first answers that it is under way.
				for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
					err = r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1})
					if err == nil || strings.Contains(err.Error(), "no room") || time.Now().After(deadline) {
						break
					}
				}
			}
			if err == nil {
				t.Fatal("no error")
			}
			for _, text := range []string{err.Error(), r.said()} {
				if !strings.Contains(text, "no room") || strings.ContainsAny(text, "\x1b\u202e") {
					t.Errorf("%q", text)
				}
			}
		})
	}
}

// C21: a pod decides how long the words of an event are. The agent remembers events, and its memory is the node's.
func TestC21_APodsLongWordsAreNotKept(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
		p.Spec.Containers[0].VolumeMounts[0].SubPath = strings.Repeat("n", 1<<20)
	}))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	if said := r.said(); !strings.Contains(said, "a path inside the volume is needed") || len(said) > 1000 {
		t.Errorf("event of %d bytes: %.300s", len(said), said)
	}
	r.agent.tell(PodKey{UID: "u1"}, corev1.EventTypeWarning, EventFailed, strings.Repeat("long ", 1<<20), "")
	for event := range r.agent.told {
		if len(event) > 2*plain.Most {
			t.Errorf("%d bytes are kept of %.80s", len(event), event)
		}
	}
}
