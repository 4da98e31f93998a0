package testcrust

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/nri/pkg/api"

	"github.com/crust-csi/crust-csi/internal/csiclient"
)

// Tenant is a pod with one volume, as the kubelet and the container runtime start and stop it.
type Tenant struct {
	A       *Agent
	Name    string
	V       csiclient.Volume
	Target  string
	Sandbox *api.PodSandbox
	Holder  *Holder
}

// Tenant returns a new tenant, whose sandbox process is already running.
func (a *Agent) Tenant(t testing.TB, name string, v csiclient.Volume) *Tenant {
	t.Helper()
	holder := a.S.NewHolder(t, "")
	pid := holder.Cmd.Process.Pid
	holder.ID = fmt.Sprintf("%s-%d", name, pid)
	return &Tenant{
		A: a, Name: name, V: v, Target: a.S.Node.Target(name), Holder: holder,
		Sandbox: &api.PodSandbox{Id: holder.ID, Name: name, Namespace: agentNamespace, Uid: "uid-" + name, Pid: uint32(pid)},
	}
}

// hook is a call from the container runtime to the agent; the runtime gives up after 2 s.
func (p *Tenant) hook(ctx context.Context, f func(context.Context, api.PluginService) error) error {
	plugin := p.A.NRI.Plugin()
	if plugin == nil {
		return errors.New("the agent is not connected to NRI")
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return f(ctx, plugin)
}

// Publish is NodePublishVolume, as the kubelet calls the agent.
func (p *Tenant) Publish(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(p.Target), 0o750); err != nil {
		return err
	}
	about := maps.Clone(p.V.Context)
	about["csi.storage.k8s.io/pod.name"] = p.Name
	about["csi.storage.k8s.io/pod.namespace"] = agentNamespace
	about["csi.storage.k8s.io/pod.uid"] = p.Sandbox.GetUid()
	_, err := p.A.Kubelet.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: p.V.ID, StagingTargetPath: p.A.Kubelet.StagingPath(p.V.ID), TargetPath: p.Target,
		VolumeCapability: p.V.Capability(), VolumeContext: about,
	})
	return err
}

// Run reports the sandbox's start to the agent, once, whatever it answers.
func (p *Tenant) Run(ctx context.Context) error {
	p.A.NRI.mu.Lock()
	p.A.NRI.sandboxes[p.Sandbox.GetId()] = p.Sandbox
	p.A.NRI.mu.Unlock()
	return p.hook(ctx, func(ctx context.Context, plugin api.PluginService) error {
		_, err := plugin.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: p.Sandbox})
		return err
	})
}

// Create reports the creation of a container to the agent.
func (p *Tenant) Create(ctx context.Context) error {
	return p.hook(ctx, func(ctx context.Context, plugin api.PluginService) error {
		container := &api.Container{Id: "c", PodSandboxId: p.Sandbox.GetId()}
		_, err := plugin.CreateContainer(ctx, &api.CreateContainerRequest{Pod: p.Sandbox, Container: container})
		return err
	})
}

// Stats is NodeGetVolumeStats.
func (p *Tenant) Stats(ctx context.Context) error {
	r, err := p.A.Kubelet.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: p.V.ID, VolumePath: p.Target, StagingTargetPath: p.A.Kubelet.StagingPath(p.V.ID),
	})
	if err == nil && len(r.GetUsage()) == 0 {
		err = errors.New("no usage")
	}
	return err
}

// Stop reports the sandbox's end to the agent, once; then the sandbox ends.
func (p *Tenant) Stop(ctx context.Context) error {
	err := p.hook(ctx, func(ctx context.Context, plugin api.PluginService) error {
		_, err := plugin.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: p.Sandbox})
		return err
	})
	p.Holder.Kill()
	p.A.NRI.mu.Lock()
	defer p.A.NRI.mu.Unlock()
	delete(p.A.NRI.sandboxes, p.Sandbox.GetId())
	return err
}

// Unpublish is NodeUnpublishVolume.
func (p *Tenant) Unpublish(ctx context.Context) error {
	return p.A.Kubelet.Unpublish(ctx, p.V.ID, p.Target)
}
