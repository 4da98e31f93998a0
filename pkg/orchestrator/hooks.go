package orchestrator

import (
	"context"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
)

// hookPatience bounds how long a hook delays the container runtime. NRI takes a plugin for dead after
// 2 s and goes on without it.
const hookPatience = 1500 * time.Millisecond

// patientAgain is how long a volume's publishes share that patience: each container of a pod tries one, and guests choose how long it takes
// until it fails. The runtime holds up all pods of the node while a hook runs.
const patientAgain = time.Minute

// Sandbox is a pod's sandbox, as the container runtime reports it.
type Sandbox struct {
	ID     string
	PodUID string
	PID    int64 // of its first process; 0 if the sandbox has ended
}

func (s Sandbox) podSandbox() podSandbox { return podSandbox{s.ID, s.PID} }

// Resume publishes what is missing in the sandboxes of a container runtime. Call it after each
// connection with all sandboxes that the runtime lists. It does not block.
func (a *Agent) Resume(sandboxes []Sandbox) {
	alive := map[string]bool{} // ended ones are listed too, for a while
	for _, s := range sandboxes {
		alive[s.ID] = s.PID != 0
	}
	for _, s := range sandboxes {
		for _, d := range a.Records.Of(s.PodUID) {
			begun := d.Sandbox == s.ID && !d.Published // nobody may have seen the end
			if s.PID != 0 && (begun || !alive[d.Sandbox]) {
				a.Log.Info("publishing what was missed", "volume_id", d.VolumeID, "sandbox_id", s.ID)
				a.start(d.Target, s.podSandbox())
			}
		}
	}
}

// SandboxStarted publishes the pod's deferred volumes; an error fails the pod. A slow publish goes on
// after it returns.
func (a *Agent) SandboxStarted(ctx context.Context, s Sandbox) error {
	return a.publishAll(ctx, s.PodUID, s.podSandbox())
}

// ContainerStarts checks whether the pod's volumes are there, before a container is created. If not,
// because a publish failed or was never requested, it tries again. With an error, the container must
// not start.
func (a *Agent) ContainerStarts(ctx context.Context, s Sandbox) error {
	for _, d := range a.Records.Of(s.PodUID) {
		if d.in(s.ID) {
			a.refresh(d.Target, s.podSandbox())
		}
	}
	if err := a.publishAll(ctx, s.PodUID, s.podSandbox()); err != nil {
		return err
	}
	return a.missing(s.PodUID, s.ID)
}

// SandboxEnds cancels running publishes and deregisters the sandbox. If that fails, the runtime sees
// the end of the sandbox's process.
func (a *Agent) SandboxEnds(ctx context.Context, s Sandbox) {
	sockets := map[string]bool{}
	for _, d := range a.Records.Of(s.PodUID) {
		a.mu.Lock()
		if t := a.tasks[d.Target]; t != nil && t.sandbox == s.ID {
			t.cancel()
		}
		a.mu.Unlock()
		if d.Sandbox == s.ID {
			sockets[d.Socket] = true
		}
	}
	failpoint.Hit("agent.stopping")
	ctx, cancel := context.WithTimeout(ctx, a.hookPatience)
	defer cancel()
	for socket := range sockets {
		if err := a.runtimes.deregister(ctx, socket, s.ID); err != nil {
			a.Log.Warn("a sandbox that ends is not deregistered yet", "sandbox_id", s.ID, "error", err)
		}
	}
}
