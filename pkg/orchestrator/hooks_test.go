package orchestrator

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A runtime that is briefly busy or away is asked again, in the same sandbox.
func TestC22_ABusyRuntimeIsAskedAgain(t *testing.T) {
	r := deferredRig(t)
	var mu sync.Mutex
	answers := []codes.Code{codes.Aborted, codes.Unavailable, codes.DeadlineExceeded}
	r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if call != "RuntimePublishVolume" || len(answers) == 0 {
			return nil
		}
		code := answers[0]
		answers = answers[1:]
		return status.Error(code, "one moment")
	}
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	ok(t, r.agent.missing("u1", "sb"))
}

// C17: a kubelet that waits for a volume's growth starts no container, so a volume that is mounted when its container starts must not
// hold growth up. It is not called mounted either.
func TestC17_GrowthOfAPendingVolumeHoldsUpNoContainer(t *testing.T) {
	r := deferredRig(t)
	r.runtime.Pending = true
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	if told := r.said(); strings.Contains(told, EventPublished) {
		t.Errorf("events: %s", told)
	}
	r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
		if call == "RuntimeExpandVolume" {
			return status.Error(codes.Unavailable, "not mounted yet")
		}
		return nil
	}
	grow := &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target}
	if _, err := r.kubelet.NodeExpandVolume(r.ctx(), grow); err != nil {
		t.Errorf("growth while it is pending: %v", err)
	}
	r.runtime.Pending = false
	if _, err := r.kubelet.NodeExpandVolume(r.ctx(), grow); status.Code(err) != codes.Unavailable {
		t.Errorf("growth when it is mounted, and the runtime does not answer: %v", err)
	}
}

// An agent that ended midway finds its record, and goes on when it learns of the sandbox. Until
// then a kubelet that grows the volume can still start one.
func TestC22_APublishThatWasBegunIsFinished(t *testing.T) {
	r := deferredRig(t)
	ok(t, r.agent.Records.Place(target, "sb", false))
	grow := &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target}
	if _, err := r.kubelet.NodeExpandVolume(r.ctx(), grow); err != nil {
		t.Errorf("growth: %v", err)
	}
	began, release := r.hold("RuntimePublishVolume")
	r.agent.Resume([]Sandbox{{ID: "sb", PodUID: "u1", PID: 1}})
	<-began
	if _, err := r.kubelet.NodeExpandVolume(r.ctx(), grow); status.Code(err) != codes.Unavailable {
		t.Errorf("growth while it is mounted: %v", err)
	}
	release()
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	ok(t, r.agent.missing("u1", "sb"))
	// An ended sandbox has nothing to grow.
	r.runtime.Fail = func(_ context.Context, call string, _ proto.Message) error {
		if call == "RuntimeExpandVolume" {
			return status.Error(codes.NotFound, "no such sandbox")
		}
		return nil
	}
	if _, err := r.kubelet.NodeExpandVolume(r.ctx(), grow); err != nil {
		t.Errorf("growth after the sandbox: %v", err)
	}
}

// A record that cannot be rewritten leaves what is published as it is.
func TestC22_ARecordThatCannotBeWrittenAgain(t *testing.T) {
	r := deferredRig(t)
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	ok(t, os.RemoveAll(r.records))
	r.driver.mu.Lock()
	r.driver.options = map[string]string{"nodev": ""} // something to write
	r.driver.mu.Unlock()
	if _, err := r.kubelet.NodePublishVolume(r.ctx(), request()); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
	if !r.driver.deferred[target] {
		t.Error("the driver was told to unpublish")
	}
}

// The kubelet's repeated publish does not undo what the sandbox did meanwhile.
func TestC22_ARepeatedPublishKeepsTheSandbox(t *testing.T) {
	r := deferredRig(t)
	before, _ := r.agent.Records.Get(target) // as a running call has it
	ok(t, r.agent.Records.Place(target, "sb", false))
	begun, _ := r.agent.Records.Get(target)
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	ok(t, r.agent.Records.Put(before))
	ok(t, r.agent.Records.Put(begun))
	ok(t, r.agent.missing("u1", "sb"))
}

// After a reconnect the runtime also lists ended sandboxes. A running one loses nothing.
func TestC22_SynchronizeMovesNothingFromARunningSandbox(t *testing.T) {
	r := deferredRig(t)
	ended, lives := Sandbox{ID: "old", PodUID: "u1"}, Sandbox{ID: "new", PodUID: "u1", PID: 1}
	sandboxIs := func(want string) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			d, _ := r.agent.Records.Get(target)
			if d.in(want) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("published in %q, not %q", d.Sandbox, want)
			}
		}
	}
	r.agent.Resume([]Sandbox{ended, lives})
	sandboxIs("new")
	r.agent.Resume([]Sandbox{lives, ended})
	ok(t, r.agent.missing("u1", "new"))
	if got := r.runtime.Published("old", "/dev/loop7"); got != nil {
		t.Errorf("in the sandbox that has ended: %v", got)
	}
	// One that ended while the agent was away.
	asked := make(chan string, 10)
	r.runtime.Fail = func(_ context.Context, call string, m proto.Message) error {
		if p, ok := m.(*crustv1alpha1.RuntimePublishVolumeRequest); ok {
			asked <- p.GetSandboxId()
		}
		return nil
	}
	r.agent.Resume([]Sandbox{{ID: "new", PodUID: "u1"}, {ID: "newer", PodUID: "u1", PID: 1}})
	if got := <-asked; got != "newer" {
		t.Errorf("asked for %q", got)
	}
}

// hold blocks the runtime's calls of one name until they are cancelled or released; each sends to
// began.
func (r *rig) hold(name string) (began chan struct{}, release func()) {
	began = make(chan struct{}, 100)
	released := make(chan struct{})
	r.runtime.Fail = func(ctx context.Context, call string, _ proto.Message) error {
		if call != name {
			return nil
		}
		began <- struct{}{}
		select {
		case <-released:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return began, func() { close(released) }
}

// Nothing publishes a volume while it is unpublished.
func TestC22_NothingBeginsWhileAVolumeIsUnpublished(t *testing.T) {
	r := deferredRig(t)
	allow, err := r.agent.letGo(r.ctx(), target)
	ok(t, err)
	if err := r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}); !errors.Is(err, errEnded) {
		t.Errorf("%v", err)
	}
	ok(t, r.agent.Records.Remove(target))
	allow()
	// A task that looked before.
	task := r.agent.start(target, podSandbox{"sb", 1})
	<-task.done
	if !errors.Is(task.err, errEnded) || slices.Contains(r.runtime.Calls(), "RuntimePublishVolume") {
		t.Errorf("%v, calls %v", task.err, r.runtime.Calls())
	}
}

// An unpublish ends a running publish, and has the runtime release the volume, however often that
// is busy, before it calls the driver.
func TestC22_UnpublishEndsAPublish(t *testing.T) {
	r := deferredRig(t)
	began, _ := r.hold("RuntimePublishVolume")
	task := r.agent.start(target, podSandbox{"sb", 1})
	<-began
	if d, _ := r.agent.Records.Get(target); d.Sandbox != "sb" || d.in("sb") {
		t.Errorf("%+v", d)
	}
	r.manager.busy.Store(2)
	ok(t, r.unpublish())
	if <-task.done; !errors.Is(task.err, errEnded) || r.manager.asked.Load() != 3 {
		t.Errorf("%v, asked %d times", task.err, r.manager.asked.Load())
	}
	if said := r.said(); strings.Contains(said, EventFailed) {
		t.Errorf("events: %s", said)
	}
	if _, known := r.agent.Records.Get(target); known || r.driver.deferred[target] {
		t.Error("still deferred")
	}
}

// The kubelet abandons a publish and unpublishes: one after the other.
func TestC22_OneCallForATargetAtATime(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	began, release := r.hold("RuntimeGetCapabilities")
	published := make(chan error, 1)
	go func() { _, err := r.kubelet.NodePublishVolume(r.ctx(), request()); published <- err }()
	<-began
	if err := r.unpublish(); status.Code(err) != codes.Aborted {
		t.Errorf("%v", err)
	}
	release()
	ok(t, <-published)
	ok(t, r.unpublish())
	if _, known := r.agent.Records.Get(target); known {
		t.Error("a record without a deferral")
	}
}

// The end of a sandbox ends its publishes.
func TestC22_ASandboxEndsDuringAPublish(t *testing.T) {
	r := deferredRig(t)
	began, _ := r.hold("RuntimePublishVolume")
	task := r.agent.start(target, podSandbox{"sb", 1})
	<-began
	r.agent.SandboxEnds(r.ctx(), Sandbox{ID: "sb", PodUID: "u1"})
	if <-task.done; !errors.Is(task.err, errEnded) {
		t.Errorf("%v", task.err)
	}
	if said := r.said(); strings.Contains(said, EventFailed) {
		t.Errorf("events: %s", said)
	}
}

// A runtime that lost a volume gets it again when a container wants it: the agent trusts its
// record, but asks the runtime too.
func TestC22_ALostVolumeIsPublishedAgain(t *testing.T) {
	r := deferredRig(t)
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	asked, release := r.hold("RuntimePublishVolume")
	release()
	if err := r.agent.ContainerStarts(r.ctx(), Sandbox{ID: "sb", PodUID: "u1", PID: 1}); err != nil {
		t.Errorf("the record says that it is there: %v", err)
	}
	select {
	case <-asked:
	case <-time.After(time.Minute):
		t.Error("the runtime is not asked whether it is")
	}
}

// A guest chooses how long a publish takes until it fails, and each container of the pod tries one. Their hooks wait once a minute.
func TestC24_PublishesThatFailSlowlyShareAHooksPatience(t *testing.T) {
	r := deferredRig(t)
	r.agent.hookPatience = hookPatience
	next := make(chan chan struct{}, 9)
	r.runtime.Fail = func(ctx context.Context, call string, _ proto.Message) error {
		if call != "RuntimePublishVolume" {
			return nil
		}
		fail := make(chan struct{})
		next <- fail
		select {
		case <-fail:
			return status.Error(codes.FailedPrecondition, "a broken file system")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	b := podSandbox{"sb", 1}
	hook := func() time.Duration {
		begin := time.Now()
		ok(t, r.agent.publishAll(r.ctx(), "u1", b))
		return time.Since(begin)
	}
	fails := func() {
		close(<-next)
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if err := r.agent.missing("u1", "sb"); err != nil && strings.Contains(err.Error(), "a broken file system") {
				return
			}
			if time.Now().After(end) {
				t.Fatal("it does not fail")
			}
		}
	}
	if took := hook(); took < hookPatience*9/10 {
		t.Errorf("the first hook waited for %s", took)
	}
	fails()
	if took := hook(); took > hookPatience*9/10 {
		t.Errorf("the hook of another container waited for %s, too", took)
	}
	fails()
	r.agent.mu.Lock()
	for _, t := range r.agent.tasks {
		t.began = t.began.Add(-patientAgain)
	}
	r.agent.mu.Unlock()
	if took := hook(); took < hookPatience*9/10 {
		t.Errorf("after a minute, the hook waited for %s", took)
	}
	fails()
	ok(t, r.unpublish())
}
