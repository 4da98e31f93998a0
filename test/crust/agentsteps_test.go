package crust

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
)

// tenant is a pod with one volume, as the kubelet and the container runtime bring it
// up and take it away.
type tenant struct {
	a       *agent
	name    string
	v       csiclient.Volume
	target  string
	sandbox *api.PodSandbox
	holder  *namespaced
}

func (a *agent) tenant(t *testing.T, name string, v csiclient.Volume) *tenant {
	t.Helper()
	process := exec.Command("sleep", "3600")
	ok(t, process.Start())
	id := fmt.Sprintf("%s-%d", name, process.Process.Pid)
	p := &tenant{a: a, name: name, v: v, target: a.s.node.Target(name), holder: &namespaced{t: t, s: a.s, id: id, cmd: process}}
	t.Cleanup(p.holder.kill)
	p.sandbox = &api.PodSandbox{Id: id, Name: name, Namespace: agentNamespace, Uid: "uid-" + name, Pid: uint32(process.Process.Pid)}
	return p
}

// hook is a call of the agent's by the container runtime, which gives up after 2 s.
func (p *tenant) hook(ctx context.Context, f func(context.Context, api.PluginService) error) error {
	plugin := p.a.nri.plugin()
	if plugin == nil {
		return errors.New("the agent is not connected to NRI")
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return f(ctx, plugin)
}

func (p *tenant) publish(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(p.target), 0o750); err != nil {
		return err
	}
	about := maps.Clone(p.v.Context)
	about["csi.storage.k8s.io/pod.name"] = p.name
	about["csi.storage.k8s.io/pod.namespace"] = agentNamespace
	about["csi.storage.k8s.io/pod.uid"] = p.sandbox.GetUid()
	_, err := p.a.kubelet.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: p.v.ID, StagingTargetPath: p.a.kubelet.StagingPath(p.v.ID), TargetPath: p.target,
		VolumeCapability: p.v.Capability(), VolumeContext: about,
	})
	return err
}

// run tells the agent of the sandbox's start, once, whatever the agent answers.
func (p *tenant) run(ctx context.Context) error {
	p.a.nri.mu.Lock()
	p.a.nri.sandboxes[p.sandbox.GetId()] = p.sandbox
	p.a.nri.mu.Unlock()
	return p.hook(ctx, func(ctx context.Context, plugin api.PluginService) error {
		_, err := plugin.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: p.sandbox})
		return err
	})
}

func (p *tenant) create(ctx context.Context) error {
	return p.hook(ctx, func(ctx context.Context, plugin api.PluginService) error {
		container := &api.Container{Id: "c", PodSandboxId: p.sandbox.GetId()}
		_, err := plugin.CreateContainer(ctx, &api.CreateContainerRequest{Pod: p.sandbox, Container: container})
		return err
	})
}

func (p *tenant) stats(ctx context.Context) error {
	r, err := p.a.kubelet.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: p.v.ID, VolumePath: p.target, StagingTargetPath: p.a.kubelet.StagingPath(p.v.ID),
	})
	if err == nil && len(r.GetUsage()) == 0 {
		err = errors.New("no usage")
	}
	return err
}

// stop tells the agent of the sandbox's end, once; then the sandbox ends.
func (p *tenant) stop(ctx context.Context) error {
	err := p.hook(ctx, func(ctx context.Context, plugin api.PluginService) error {
		_, err := plugin.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: p.sandbox})
		return err
	})
	p.holder.kill()
	p.a.nri.mu.Lock()
	defer p.a.nri.mu.Unlock()
	delete(p.a.nri.sandboxes, p.sandbox.GetId())
	return err
}

func (p *tenant) unpublish(ctx context.Context) error {
	return p.a.kubelet.Unpublish(ctx, p.v.ID, p.target)
}

// life is all that happens to a pod. A call that fails is made again, as the kubelet
// does, except those that announce the sandbox's start and end. failed is called
// after each failure.
func (p *tenant) life(ctx context.Context, word string, failed func()) error {
	again := func(call func(context.Context) error) error { return repeated(ctx, p.name, call, failed) }
	once := func(f func(context.Context) error) {
		if err := f(ctx); err != nil {
			failed()
		}
	}
	if err := again(p.publish); err != nil {
		return err
	}
	once(p.run)
	if err := again(p.create); err != nil {
		return err
	}
	if out, err := p.holder.exec("cat " + p.target + "/word"); err != nil || out != word {
		return fmt.Errorf("pod %s reads %q, %w", p.name, out, err)
	}
	if err := again(p.stats); err != nil {
		return err
	}
	once(p.stop)
	return again(p.unpublish)
}

// repeated makes a call again until it succeeds, or ctx ends. failed is called after
// each failure.
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

// agentWithVolumes is an agent, and pods' volumes with a word on each.
func agentWithVolumes(t *testing.T) (a *agent, volumes []csiclient.Volume) {
	t.Helper()
	a = newAgent(t)
	for _, name := range []string{"va", "vb"} {
		v := a.s.volume(name, "ext4")
		target := a.s.node.Target(name)
		ok(t, a.s.node.Client.Publish(ctxOf(t), v, target, false))
		ok(t, os.WriteFile(target+"/word", []byte(name), 0o600))
		ok(t, a.s.node.Client.Unpublish(ctxOf(t), v.ID, target))
		volumes = append(volumes, v)
	}
	t.Cleanup(func() {
		for _, v := range volumes {
			a.s.delete(v)
		}
	})
	return a, volumes
}

// agentSteps are the agent's failpoints.
func agentSteps(t *testing.T) []string {
	t.Helper()
	own := failpoints(t, "../../pkg/orchestrator")
	if len(own) < 5 {
		t.Fatalf("crust-agent has only %v", own)
	}
	return append(own, "record.written", "record.renamed")
}

// nothingLeft looks for what the agent keeps of deferrals.
func (a *agent) nothingLeft(t *testing.T) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(a.dir, "state/deferrals/*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left of the agent: %v, %v", left, err)
	}
}

// TestD06_AgentErrorOrKillAtEveryStep has each step of crust-agent fail in turn, and then
// kill it: the pod gets its volume all the same, and nothing is left in the end.
func TestD06_AgentErrorOrKillAtEveryStep(t *testing.T) {
	a, volumes := agentWithVolumes(t)
	for _, mode := range []string{"error", "kill"} {
		for _, point := range agentSteps(t) {
			if mode == "error" && !fails(t, point) {
				continue
			}
			t.Run(mode+"/"+point, func(t *testing.T) {
				p := a.tenant(t, "pa", volumes[0])
				a.at.Set(t, point, mode)
				err := p.life(ctxOf(t), "va", func() {
					if a.at.Reached() {
						a.at.Off(t)
					}
					if a.dead() {
						a.start()
					}
				})
				a.at.Off(t)
				ok(t, err)
				if !a.at.Reached() {
					t.Error("the step was not reached")
				}
				a.nothingLeft(t)
			})
		}
	}
}

// fails tells whether a step can fail.
func fails(t *testing.T, point string) bool {
	t.Helper()
	return exec.Command("grep", "-rq", `failpoint.Err("`+point+`")`, "../../pkg/orchestrator", "../../internal/record").Run() == nil
}

// TestD06_AgentHungAtEveryStep has each step hang in turn: another pod has its whole life
// meanwhile, a second call on the same volume is answered, and what hung goes on when
// it can.
func TestD06_AgentHungAtEveryStep(t *testing.T) {
	a, volumes := agentWithVolumes(t)
	for _, point := range agentSteps(t) {
		t.Run(point, func(t *testing.T) {
			p, q := a.tenant(t, "pa", volumes[0]), a.tenant(t, "pb", volumes[1])
			hung, ended := a.at.Hang(t, point, func() error { return p.life(ctxOf(t), "va", func() {}) })
			if !hung {
				t.Error("the step was not reached")
			} else {
				ctx, cancel := context.WithTimeout(context.Background(), longest)
				defer cancel()
				if err := p.stats(ctx); status.Code(err) == codes.DeadlineExceeded {
					t.Errorf("while it hangs, the same volume's stats get no answer: %v", err)
				}
				if err := q.life(ctx, "vb", func() {}); err != nil {
					t.Errorf("while it hangs, another pod: %v", err)
				}
			}
			a.at.Off(t)
			ok(t, <-ended)
			a.nothingLeft(t)
		})
	}
}
