package crust

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// life runs everything that happens to a pod. Like the kubelet it repeats a call that fails, except
// those that announce the sandbox's start and end. It calls failed after each failure.
func life(ctx context.Context, p *testcrust.Tenant, word string, failed func()) error {
	again := func(call func(context.Context) error) error { return repeated(ctx, p.Name, call, failed) }
	once := func(f func(context.Context) error) {
		if err := f(ctx); err != nil {
			failed()
		}
	}
	if err := again(p.Publish); err != nil {
		return err
	}
	once(p.Run)
	if err := again(p.Create); err != nil {
		return err
	}
	if out, err := p.Holder.Exec("cat " + p.Target + "/word"); err != nil || out != word {
		return fmt.Errorf("pod %s reads %q, %w", p.Name, out, err)
	}
	if err := again(p.Stats); err != nil {
		return err
	}
	once(p.Stop)
	return again(p.Unpublish)
}

// repeated makes a call until it succeeds or ctx ends. It calls failed after each failure.
func repeated(ctx context.Context, name string, call func(context.Context) error, failed func()) error {
	for {
		err := call(ctx)
		if err == nil {
			return nil
		}
		failed()
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// agentWithVolumes starts an agent and makes pods' volumes with a word on each.
func agentWithVolumes(t *testing.T) (a *testcrust.Agent, volumes []csiclient.Volume) {
	t.Helper()
	a = testcrust.NewAgent(t, newServer(t, "namespace", "").Server, testnode.BuildCommand(t, "crust-agent", "failpoint"))
	for _, name := range []string{"va", "vb"} {
		v := a.S.Volume(name, "ext4")
		target := a.S.Node.Target(name)
		ok(t, a.S.Node.Client.Publish(ctxOf(t), v, target, false))
		ok(t, os.WriteFile(target+"/word", []byte(name), 0o600))
		ok(t, a.S.Node.Client.Unpublish(ctxOf(t), v.ID, target))
		volumes = append(volumes, v)
	}
	t.Cleanup(func() {
		for _, v := range volumes {
			a.S.Delete(v)
		}
	})
	return a, volumes
}

// agentSteps returns the agent's failpoints.
func agentSteps(t *testing.T) []string {
	t.Helper()
	own := failpoints(t, "../../pkg/orchestrator")
	if len(own) < 5 {
		t.Fatalf("crust-agent has only %v", own)
	}
	return append(own, "record.written", "record.renamed")
}

// nothingLeft expects no record of a deferral.
func nothingLeft(t *testing.T, a *testcrust.Agent) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(a.Dir, "state/deferrals/*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left of the agent: %v, %v", left, err)
	}
}

// D06: each step of crust-agent in turn fails, and then kills it. The pod still gets its volume,
// and nothing is left in the end.
func TestD06_AgentErrorOrKillAtEveryStep(t *testing.T) {
	a, volumes := agentWithVolumes(t)
	for _, mode := range []string{"error", "kill"} {
		for _, point := range agentSteps(t) {
			if mode == "error" && !fails(t, point) {
				continue
			}
			t.Run(mode+"/"+point, func(t *testing.T) {
				p := a.Tenant(t, "pa", volumes[0])
				a.At.Set(t, point, mode)
				err := life(ctxOf(t), p, "va", func() {
					if a.At.Reached() {
						a.At.Off(t)
					}
					if a.Dead() {
						a.Start()
					}
				})
				a.At.Off(t)
				ok(t, err)
				if !a.At.Reached() {
					t.Error("the step was not reached")
				}
				nothingLeft(t, a)
			})
		}
	}
}

// fails reports whether a step can return an error.
func fails(t *testing.T, point string) bool {
	t.Helper()
	return exec.Command("grep", "-rq", `failpoint.Err("`+point+`")`, "../../pkg/orchestrator", "../../internal/record").Run() == nil
}

// D06: each step hangs in turn. Meanwhile another pod lives its whole life, and a second call on
// the same volume is answered. The hung call continues when it is released.
func TestD06_AgentHungAtEveryStep(t *testing.T) {
	a, volumes := agentWithVolumes(t)
	for _, point := range agentSteps(t) {
		t.Run(point, func(t *testing.T) {
			p, q := a.Tenant(t, "pa", volumes[0]), a.Tenant(t, "pb", volumes[1])
			hung, ended := a.At.Hang(t, point, func() error { return life(ctxOf(t), p, "va", func() {}) })
			if !hung {
				t.Error("the step was not reached")
			} else {
				ctx, cancel := context.WithTimeout(context.Background(), testcrust.Longest())
				defer cancel()
				if err := p.Stats(ctx); status.Code(err) == codes.DeadlineExceeded {
					t.Errorf("while it hangs, the same volume's stats get no answer: %v", err)
				}
				if err := life(ctx, q, "vb", func() {}); err != nil {
					t.Errorf("while it hangs, another pod: %v", err)
				}
			}
			a.At.Off(t)
			ok(t, <-ended)
			nothingLeft(t, a)
		})
	}
}
