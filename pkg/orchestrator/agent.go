package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	eventrecorder "k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// What the kubelet tells a driver of a pod (podInfoOnMount), and what the agent
// adds to it.
const (
	attrPodName      = "csi.storage.k8s.io/pod.name"
	attrPodNamespace = "csi.storage.k8s.io/pod.namespace"
	attrPodUID       = "csi.storage.k8s.io/pod.uid"
	attrEphemeral    = "csi.storage.k8s.io/ephemeral"
	attrPodPolicy    = "csi.storage.k8s.io/pod.fsGroupChangePolicy"
	attrHostUsers    = "csi.crust.dev/hostUsers"
)

// The reasons of the agent's events on pods.
const (
	EventMountedByHost = "MountedByHost"      // a volume of a pod with a CRUST runtime was mounted by the node
	EventDeferred      = "MountDeferred"      // a volume was left to the pod's sandbox
	EventPublished     = "MountedInSandbox"   // the sandbox has mounted it
	EventFailed        = "SandboxMountFailed" // it could not be decided, or not be carried out
)

// Config of an Agent.
type Config struct {
	Driver  grpc.ClientConnInterface // the CSI driver's own socket
	Pods    *Pods
	Records *Records
	Events  eventrecorder.EventRecorder
	Log     *slog.Logger
	// Count is told of decisions and of what became of them; nil for nobody.
	Count func(outcome string)
}

// Agent decides and carries out.
type Agent struct {
	Config
	runtimes runtimes

	mu     sync.Mutex
	told   map[string]bool // events that were sent
	tasks  map[string]*task
	ending map[string]bool // targets that are being unpublished
	life   context.Context
	stop   func()
	work   sync.WaitGroup
}

// New makes one. Close it at the end.
func New(c Config) *Agent {
	a := &Agent{Config: c, told: map[string]bool{}, tasks: map[string]*task{}, ending: map[string]bool{}, runtimes: runtimes{registering: make(chan struct{}, 1)}}
	if a.Count == nil {
		a.Count = func(string) {}
	}
	a.life, a.stop = context.WithCancel(context.Background())
	return a
}

// Close lets go of everything; what is published stays so.
func (a *Agent) Close() error {
	a.stop()
	a.work.Wait()
	return a.runtimes.close()
}

const node = "/csi.v1.Node/"

// Proxy stands for the driver.
func (a *Agent) Proxy() *Proxy {
	return &Proxy{Driver: a.Driver, Handlers: map[string]Handler{
		node + "NodePublishVolume":   a.nodePublish,
		node + "NodeUnpublishVolume": a.nodeUnpublish,
		node + "NodeGetVolumeStats":  a.nodeStats,
		node + "NodeExpandVolume":    a.nodeExpand,
	}}
}

// forward sends a message that was changed, and reads the answer.
func forward[T any, P interface {
	*T
	proto.Message
}](ctx context.Context, next Call, request proto.Message) (answer P, raw []byte, err error) {
	b, err := proto.Marshal(request)
	if err != nil {
		return nil, nil, err
	}
	if raw, err = next(ctx, b); err != nil {
		return nil, nil, err
	}
	answer = new(T)
	if err := proto.Unmarshal(raw, answer); err != nil {
		return nil, nil, status.Errorf(codes.Internal, "the driver's answer: %s", err)
	}
	return answer, raw, nil
}

// tell sends an event on a pod, each text once.
func (a *Agent) tell(k PodKey, kind, reason, text string) {
	id := k.UID + " " + reason + " " + text
	a.mu.Lock()
	sent := a.told[id]
	if len(a.told) > 10_000 {
		clear(a.told)
	}
	a.told[id] = true
	a.mu.Unlock()
	if !sent {
		a.Events.Event(&corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: k.Namespace, Name: k.Name, UID: types.UID(k.UID)}, kind, reason, text)
	}
}

// fails is an error that the pod is told of as well.
func (a *Agent) fails(k PodKey, code codes.Code, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	a.Count("failed")
	a.tell(k, corev1.EventTypeWarning, EventFailed, err.Error())
	return status.Error(code, err.Error())
}

func (a *Agent) nodePublish(ctx context.Context, request []byte, next Call) ([]byte, error) {
	req := &csi.NodePublishVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "NodePublishVolumeRequest: %s", err)
	}
	attrs := req.GetVolumeContext()
	k := PodKey{attrs[attrPodNamespace], attrs[attrPodName], attrs[attrPodUID]}
	if k.UID == "" || k.Name == "" {
		return next(ctx, request) // podInfoOnMount is off
	}
	pod, err := a.Pods.Get(ctx, k)
	if err != nil {
		// What the pod asks for decides who mounts; a guess could be the wrong one.
		return nil, status.Errorf(codes.Unavailable, "volume %s: what pod %s/%s asks for cannot be found out: %s", req.GetVolumeId(), k.Namespace, k.Name, err)
	}
	if add(attrs, pod) {
		if request, err = proto.Marshal(req); err != nil {
			return nil, err
		}
	}
	socket, err := a.Pods.Socket(ctx, pod)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "volume %s: the RuntimeClass of pod %s/%s: %s", req.GetVolumeId(), k.Namespace, k.Name, err)
	}
	if socket == "" {
		return next(ctx, request)
	}
	return a.publishOrDefer(ctx, req, next, pod, k, socket)
}

// add completes what the driver is told of a pod.
func add(attrs map[string]string, pod *corev1.Pod) (changed bool) {
	set := func(key, value string) {
		if _, ok := attrs[key]; !ok {
			attrs[key], changed = value, true
		}
	}
	if c := pod.Spec.SecurityContext; c != nil && c.FSGroupChangePolicy != nil {
		set(attrPodPolicy, string(*c.FSGroupChangePolicy))
	}
	if h := pod.Spec.HostUsers; h != nil && !*h {
		set(attrHostUsers, "false")
	}
	return changed
}

func (a *Agent) publishOrDefer(ctx context.Context, req *csi.NodePublishVolumeRequest, next Call, pod *corev1.Pod, k PodKey, socket string) ([]byte, error) {
	target, id := req.GetTargetPath(), req.GetVolumeId()
	name := volumeName(target, req.GetVolumeCapability().GetBlock() != nil)
	d, known := a.Records.Get(target)
	if !known {
		d = Deferral{Pod: k, VolumeID: id, Volume: name, Target: target, Socket: socket}
		decision, err := a.decide(ctx, req, pod, name, &d)
		if err != nil {
			return nil, a.fails(k, codes.Unavailable, "volume %s: it cannot be decided who mounts it: %s", name, err)
		}
		if !decision.Defer {
			return a.byHost(ctx, req, next, k, name, decision.Why)
		}
	}
	if err := crust.SetSupportedFilesystems(req, d.Filesystems); err != nil {
		return nil, err
	}
	answer, raw, err := forward[csi.NodePublishVolumeResponse](ctx, next, req)
	if err != nil {
		return nil, err
	}
	info, deferred, err := crust.MountInfoOf(answer)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "volume %s: %s", id, err)
	}
	if !deferred {
		if known { // the driver has forgotten it
			defer a.end(ctx, target)()
			if err := a.Records.Remove(target); err != nil {
				return nil, err
			}
		}
		a.Count("host")
		a.tell(k, corev1.EventTypeNormal, EventMountedByHost, fmt.Sprintf("volume %s was mounted by the host because the driver did not leave it to the runtime: its file system is none of %s, or a pod of this node has it already",
			name, strings.Join(d.Filesystems, ", ")))
		return raw, nil
	}
	d.Source, d.Type, d.Options = info.Source, info.Type, info.Options
	if readOnly(req) { // whether the driver says so or not
		d.Options = maps.Clone(d.Options)
		if d.Options == nil {
			d.Options = map[string]string{}
		}
		d.Options["ro"] = ""
	}
	if err := a.Records.Put(d); err != nil {
		// Nobody would carry it out. The code is one after which the kubelet still
		// unpublishes what it gives up.
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unpublishTimeout)
		defer cancel()
		_, uerr := csi.NewNodeClient(a.Driver).NodeUnpublishVolume(uctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		return nil, a.fails(k, codes.Unavailable, "volume %s: its deferral could not be written down: %s", name, errors.Join(err, uerr))
	}
	if !known {
		a.Count("deferred")
		a.tell(k, corev1.EventTypeNormal, EventDeferred, fmt.Sprintf("volume %s (%s) is left to the pod's sandbox, which mounts it; the node's mount table does not show it", name, d.Type))
	}
	return raw, nil
}

func readOnly(req *csi.NodePublishVolumeRequest) bool {
	switch req.GetVolumeCapability().GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		return true
	}
	return req.GetReadonly()
}

func (a *Agent) byHost(ctx context.Context, req proto.Message, next Call, k PodKey, name, why string) ([]byte, error) {
	b, err := proto.Marshal(req)
	if err != nil {
		return nil, err
	}
	b, err = next(ctx, b)
	if err == nil {
		a.Count("host")
		a.tell(k, corev1.EventTypeNormal, EventMountedByHost, fmt.Sprintf("volume %s was mounted by the host because %s", name, why))
	}
	return b, err
}

// decide asks everybody who has a say, and completes the deferral with what they
// said.
func (a *Agent) decide(ctx context.Context, req *csi.NodePublishVolumeRequest, pod *corev1.Pod, name string, d *Deferral) (crust.Decision, error) {
	no := func(why string) (crust.Decision, error) { return crust.Decision{Why: why}, nil }
	ask := crust.PodVolume{Socket: d.Socket, Block: req.GetVolumeCapability().GetBlock() != nil}
	if ask.Block {
		return crust.Decide(ask), nil
	}
	if req.GetVolumeContext()[attrEphemeral] == "true" {
		return no("it is an inline volume of the pod, which has no StorageClass to allow anything else")
	}
	if name == "" {
		return no("its target path is not one of the kubelet's, so the persistent volume is not known")
	}
	v, err := a.Pods.Volume(ctx, pod, name)
	if err != nil {
		return crust.Decision{}, err
	}
	ask.Allowed, ask.Exclusive, ask.ReadOnly = v.allowed, v.exclusive, readOnly(req)
	if v.subPath {
		return no("the pod uses a subPath of it, and this kubelet binds that on the host before the runtime is asked")
	}
	caps, err := csi.NewNodeClient(a.Driver).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return crust.Decision{}, fmt.Errorf("the driver's capabilities: %w", err)
	}
	ask.NodeDefers = slices.ContainsFunc(caps.GetCapabilities(), func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == crust.NodeCapability })
	if c := pod.Spec.SecurityContext; c != nil {
		if c.FSGroup != nil {
			gid := uint32(*c.FSGroup)
			ask.Group, d.Group = true, &gid
		}
		// The kubelet's default.
		d.GroupPolicy = string(corev1.FSGroupChangeAlways)
		if c.FSGroupChangePolicy != nil {
			d.GroupPolicy = string(*c.FSGroupChangePolicy)
		}
		ask.GroupPolicy = d.GroupPolicy
	}
	ask.LabelOnMount = slices.ContainsFunc(req.GetVolumeCapability().GetMount().GetMountFlags(), func(o string) bool { return strings.HasPrefix(o, "context=") })
	ask.Label = ask.LabelOnMount || labelled(pod) && mounter.SELinux().Answer == mounter.Yes
	// The cheap answers first: a runtime is not bothered with volumes that are not
	// for it.
	ask.Capabilities, ask.Filesystems = everything, []string{"any"}
	if decision := crust.Decide(ask); !decision.Defer {
		return decision, nil
	}
	if ask.Capabilities, ask.Filesystems, err = a.runtimes.can(ctx, d.Socket); err != nil {
		return crust.Decision{}, fmt.Errorf("the runtime at %s: %w", d.Socket, err)
	}
	d.Filesystems = ask.Filesystems
	return crust.Decide(ask), nil
}

// everything is a runtime that lacks nothing.
var everything = func() (list []crust.Capability) {
	for n := range crustv1alpha1.RuntimeCapability_RPC_Type_name {
		list = append(list, crust.Capability(n))
	}
	return list
}()

// volumeName reads the name of the PersistentVolume from a target path as the
// kubelet makes them; empty where it is another.
func volumeName(target string, block bool) string {
	if block {
		return filepath.Base(filepath.Dir(target))
	}
	dir, last := filepath.Split(target)
	name := filepath.Base(dir)
	if last != "mount" || filepath.Base(filepath.Dir(filepath.Clean(dir))) != "kubernetes.io~csi" {
		return ""
	}
	return name
}

func (a *Agent) nodeUnpublish(ctx context.Context, request []byte, next Call) ([]byte, error) {
	req := &csi.NodeUnpublishVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "NodeUnpublishVolumeRequest: %s", err)
	}
	d, ok := a.Records.Get(req.GetTargetPath())
	if !ok {
		return next(ctx, request)
	}
	defer a.end(ctx, d.Target)()
	b, err := next(ctx, request)
	if err != nil {
		return nil, err
	}
	return b, a.Records.Remove(d.Target)
}

func (a *Agent) nodeStats(ctx context.Context, request []byte, next Call) ([]byte, error) {
	req := &csi.NodeGetVolumeStatsRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "NodeGetVolumeStatsRequest: %s", err)
	}
	d, ok := a.Records.Get(req.GetVolumePath())
	if !ok {
		return next(ctx, request)
	}
	yes, err := a.can(ctx, d, crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS)
	if err != nil {
		return nil, err
	}
	if err := crust.SetSupportsStats(req, yes); err != nil {
		return nil, err
	}
	answer, raw, err := forward[csi.NodeGetVolumeStatsResponse](ctx, next, req)
	if err != nil {
		return nil, err
	}
	source, err := crust.StatsSource(answer)
	if err != nil || source == "" {
		return raw, err
	}
	c, err := a.inSandbox(d)
	if err != nil {
		return nil, err
	}
	r, err := c.RuntimeGetVolumeStats(ctx, &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: d.Sandbox, HostVolumeId: source})
	if err != nil {
		return nil, ofRuntime(d, err)
	}
	answer.Usage = nil
	for _, u := range r.GetUsage() {
		answer.Usage = append(answer.Usage, &csi.VolumeUsage{
			Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: csi.VolumeUsage_Unit(u.GetUnit()),
		})
	}
	if r.GetVolumeCondition().GetAbnormal() {
		a.tell(d.Pod, corev1.EventTypeWarning, "VolumeNotWell", fmt.Sprintf("volume %s in the pod's sandbox: %s", d.Volume, r.GetVolumeCondition().GetMessage()))
	}
	return proto.Marshal(answer)
}

func (a *Agent) nodeExpand(ctx context.Context, request []byte, next Call) ([]byte, error) {
	req := &csi.NodeExpandVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "NodeExpandVolumeRequest: %s", err)
	}
	d, ok := a.Records.Get(req.GetVolumePath())
	if !ok {
		return next(ctx, request)
	}
	yes, err := a.can(ctx, d, crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE)
	if err != nil {
		return nil, err
	}
	if err := crust.SetSupportsExpand(req, yes); err != nil {
		return nil, err
	}
	answer, raw, err := forward[csi.NodeExpandVolumeResponse](ctx, next, req)
	if err != nil {
		return nil, err
	}
	source, err := crust.ExpandSource(answer)
	if err != nil || source == "" {
		return raw, err
	}
	c, err := a.inSandbox(d)
	if err != nil {
		return nil, err
	}
	r, err := c.RuntimeExpandVolume(ctx, &crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: d.Sandbox, HostVolumeId: source, RequiredBytes: req.GetCapacityRange().GetRequiredBytes()})
	if err != nil {
		return nil, ofRuntime(d, err)
	}
	answer.CapacityBytes = r.GetCapacityBytes()
	return proto.Marshal(answer)
}

// can asks whether the runtime that has a volume does something with it.
func (a *Agent) can(ctx context.Context, d Deferral, c crust.Capability) (bool, error) {
	list, _, err := a.runtimes.can(ctx, d.Socket)
	if err != nil {
		return false, status.Errorf(codes.Unavailable, "volume %s: the runtime at %s: %s", d.VolumeID, d.Socket, err)
	}
	return slices.Contains(list, c), nil
}

// inSandbox gives the runtime that has a volume mounted.
func (a *Agent) inSandbox(d Deferral) (*crust.Client, error) {
	if d.Sandbox == "" {
		return nil, status.Errorf(codes.Unavailable, "volume %s is not mounted in the pod's sandbox yet", d.VolumeID)
	}
	return a.runtimes.client(d.Socket)
}

// ofRuntime is a runtime's refusal of what it said that it can. What it says of a
// sandbox that is coming or going must not be final for the kubelet, which would
// not try again.
func ofRuntime(d Deferral, err error) error {
	code := codes.Unavailable
	if status.Code(err) == codes.Unimplemented {
		code = codes.Unimplemented
	}
	return status.Errorf(code, "volume %s in the sandbox of pod %s/%s: %s", d.VolumeID, d.Pod.Namespace, d.Pod.Name, status.Convert(err).Message())
}
