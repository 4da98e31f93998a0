package main

import (
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// Each step that the engine reports has its own kind, and lies between the start of the call and
// now.
func TestTraces_StepsAreMeasured(t *testing.T) {
	s := steps{since: time.Now()}
	names := []string{stepDevice, engine.StepMount, engine.StepGrow, engine.StepOwnership}
	for _, name := range names {
		end := s.begin(name)
		time.Sleep(time.Millisecond)
		end(nil)
	}
	seen := map[guestv1.Step_Kind]bool{}
	last := int64(0)
	for _, step := range s.list {
		took := time.Duration(step.GetEnd() - step.GetBegin())
		if step.GetKind() == guestv1.Step_KIND_UNSPECIFIED || seen[step.GetKind()] || step.GetBegin() < last || took < time.Millisecond {
			t.Errorf("%v after %d", step, last)
		}
		seen[step.GetKind()], last = true, step.GetEnd()
	}
	if len(s.list) != len(names) || last > int64(time.Since(s.since)) {
		t.Errorf("%v", s.list)
	}
}
