package orchestrator

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A runtime that is busy or away for a moment is asked again, in the same sandbox.
func TestC22_ABusyRuntimeIsAskedAgain(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	var mu sync.Mutex
	answers := []codes.Code{codes.Aborted, codes.Unavailable}
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
	ok(t, r.agent.publishAll(r.ctx(), "u1", box{"sb", 1}))
	ok(t, r.agent.published("u1", "sb"))
}

// The kubelet's repeated publish does not undo what the sandbox has done meanwhile.
func TestC22_ARepeatedPublishKeepsTheSandbox(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	before, _ := r.agent.Records.Get(target) // as a call that is under way has it
	ok(t, r.agent.publishAll(r.ctx(), "u1", box{"sb", 1}))
	ok(t, r.agent.Records.Put(before))
	ok(t, r.agent.published("u1", "sb"))
}

// After a reconnection the runtime lists sandboxes that have ended too; nothing is
// taken from one that runs.
func TestC22_SynchronizeMovesNothingFromARunningSandbox(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	p := &Plugin{r.agent}
	ended, lives := &api.PodSandbox{Id: "old", Uid: "u1"}, &api.PodSandbox{Id: "new", Uid: "u1", Pid: 1}
	sandboxIs := func(want string) {
		t.Helper()
		for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			d, _ := r.agent.Records.Get(target)
			if d.Sandbox == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("published in %q, not %q", d.Sandbox, want)
			}
		}
	}
	_, err = p.Synchronize(r.ctx(), []*api.PodSandbox{ended, lives}, nil)
	ok(t, err)
	sandboxIs("new")
	_, err = p.Synchronize(r.ctx(), []*api.PodSandbox{lives, ended}, nil)
	ok(t, err)
	ok(t, r.agent.published("u1", "new"))
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
	_, err = p.Synchronize(r.ctx(), []*api.PodSandbox{{Id: "new", Uid: "u1"}, {Id: "newer", Uid: "u1", Pid: 1}}, nil)
	ok(t, err)
	if got := <-asked; got != "newer" {
		t.Errorf("asked for %q", got)
	}
}

// While a volume is unpublished nothing publishes it again.
func TestC22_NothingBeginsWhileAVolumeIsUnpublished(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	d, _ := r.agent.Records.Get(target)
	begin := r.agent.end(r.ctx(), target)
	if err := r.agent.publishAll(r.ctx(), "u1", box{"sb", 1}); err == nil {
		t.Error("published")
	}
	ok(t, r.agent.Records.Remove(target))
	begin()
	// One that had looked before.
	task := r.agent.start(d, box{"sb", 1})
	<-task.done
	if task.err == nil || !strings.Contains(task.err.Error(), "the pod has ended") {
		t.Errorf("%v", task.err)
	}
}
