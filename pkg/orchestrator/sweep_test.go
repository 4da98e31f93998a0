package orchestrator

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
)

// A deferral whose volume was unpublished while the agent was not installed is removed, on disk
// too; one that may still be there is kept.
func TestC24_ADeferralThatEndedWithoutTheAgent(t *testing.T) {
	for name, c := range map[string]struct {
		podGone, unpublished, apiAway, calling, runtimeAway bool
		forgotten                                           bool
	}{
		"ended": {podGone: true, unpublished: true, forgotten: true},
		"the runtime does not say that it has let go": {podGone: true, unpublished: true, runtimeAway: true},
		"the pod is there":                            {unpublished: true},
		"the driver has it":                           {podGone: true},
		"nobody knows of the pod":                     {podGone: true, unpublished: true, apiAway: true},
		"a call for it is under way already":          {podGone: true, unpublished: true, calling: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := deferredRig(t)
			if c.podGone {
				ok(t, r.cluster.CoreV1().Pods("ns").Delete(r.ctx(), "p", metav1.DeleteOptions{}))
			}
			if c.unpublished {
				r.driver.mu.Lock()
				delete(r.driver.deferred, target)
				r.driver.mu.Unlock()
			}
			if c.apiAway {
				r.cluster.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
					return true, nil, errors.New("the API server is away")
				})
			}
			if c.calling {
				done, err := r.agent.exclusive(target)
				ok(t, err)
				defer done()
			}
			d, _ := r.agent.Records.Get(target) // before it has its sandbox
			ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
			if c.runtimeAway {
				r.manager.fail.Store(true)
			}
			// The agent's watch reports the pod's end a little later.
			for end := time.Now().Add(time.Minute); c.podGone && time.Now().Before(end); time.Sleep(time.Millisecond) {
				if _, err := r.agent.Pods.pods.Pods("ns").Get("p"); err != nil {
					break
				}
			}
			forgotten, err := r.agent.forgetEnded(context.Background(), d)
			if forgotten != c.forgotten || (err != nil) != (c.apiAway || c.runtimeAway) {
				t.Errorf("forgotten: %v, %v", forgotten, err)
			}
			files, err := os.ReadDir(r.records)
			ok(t, err)
			if _, known := r.agent.Records.Get(target); known == c.forgotten || (len(files) == 0) != c.forgotten {
				t.Errorf("on record: %v, as files: %v", known, files)
			}
		})
	}
}
