package main

import (
	"time"

	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// stepDevice is the wait for a disk, before the engine's steps.
const stepDevice = "device"

var stepKinds = map[string]guestv1.Step_Kind{
	stepDevice: guestv1.Step_KIND_DEVICE, engine.StepMount: guestv1.Step_KIND_MOUNT,
	engine.StepGrow: guestv1.Step_KIND_GROW, engine.StepOwnership: guestv1.Step_KIND_OWNERSHIP,
}

// steps records the steps of one call, measured for the host.
type steps struct {
	since time.Time
	list  []*guestv1.Step
}

// begin starts a measurement; the returned function ends it.
func (s *steps) begin(name string) func(error) {
	begin := time.Since(s.since)
	return func(error) {
		s.list = append(s.list, &guestv1.Step{Kind: stepKinds[name], Begin: int64(begin), End: int64(time.Since(s.since))})
	}
}
