package orchestrator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	eventrecorder "k8s.io/client-go/tools/record"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// Volume context keys: the kubelet's for a pod (podInfoOnMount), and the agent's additions.
const (
	attrPodName      = "csi.storage.k8s.io/pod.name"
	attrPodNamespace = "csi.storage.k8s.io/pod.namespace"
	attrPodUID       = "csi.storage.k8s.io/pod.uid"
	attrEphemeral    = "csi.storage.k8s.io/ephemeral"
	attrPolicy       = "fsGroupChangePolicy" // of the class, if the driver copies it into the volume context
)

// Reasons of the agent's events on pods.
const (
	EventMountedByHost = "MountedByHost"      // the node mounted a volume of a pod with a CRUST runtime
	EventDeferred      = "MountDeferred"      // a volume was left to the pod's sandbox
	EventPublished     = "MountedInSandbox"   // the sandbox has mounted it
	EventFailed        = "SandboxMountFailed" // the decision or the mount failed
	EventNotWell       = "VolumeNotWell"      // the sandbox reports that something is wrong with a volume
)

// Config of an Agent. Driver, Pods and Records are required.
type Config struct {
	Driver  grpc.ClientConnInterface // the CSI driver's own socket
	Pods    *Pods
	Records *Records
	Events  eventrecorder.EventRecorder // nil: no events
	Log     *slog.Logger                // nil: no log
	// Count counts decisions and their outcomes; it may be nil.
	Count func(outcome string)
	// Tracer makes spans of what is carried out after the call that deferred it; nil for none.
	// DialOptions are for connections to runtimes and pass the span on.
	Tracer      trace.Tracer
	DialOptions []grpc.DialOption
}

// Agent decides who mounts pods' volumes, and carries the deferrals out.
type Agent struct {
	Config
	runtimes runtimes

	mu     sync.Mutex
	told   map[string]time.Time // events sent
	tasks  map[string]*task
	calls  map[string]bool // targets with a call under way
	ending map[string]bool // targets that are being unpublished
	leaves map[string]bool // targets that are to be unpublished, until a publish asks for them again
	life   context.Context
	stop   func()
	work   sync.WaitGroup

	hookPatience time.Duration // longer in tests in which no hook may time out
}

// New returns an Agent. The caller must close it. A Config without Driver, Pods or Records is an error.
func New(c Config) (*Agent, error) {
	if c.Driver == nil || c.Pods == nil || c.Records == nil {
		return nil, errors.New("orchestrator.New: Config wants a Driver, Pods and Records")
	}
	a := &Agent{
		Config: c, told: map[string]time.Time{}, tasks: map[string]*task{}, calls: map[string]bool{}, ending: map[string]bool{},
		leaves:   map[string]bool{},
		runtimes: runtimes{options: c.DialOptions, m: map[string]*crust.Client{}}, hookPatience: hookPatience,
	}
	a.Log = cmp.Or(a.Log, slog.New(slog.DiscardHandler))
	if a.Count == nil {
		a.Count = func(string) {}
	}
	a.life, a.stop = context.WithCancel(context.Background())
	return a, nil
}

// Close stops the agent; what is published stays so.
func (a *Agent) Close() error {
	a.stop()
	a.work.Wait()
	return a.runtimes.close()
}

const node = "/csi.v1.Node/"

// Proxy returns the driver's proxy.
func (a *Agent) Proxy() *Proxy {
	return &Proxy{Driver: a.Driver, Handlers: map[string]Handler{
		node + "NodePublishVolume":   decoded(a.nodePublish),
		node + "NodeUnpublishVolume": decoded(a.nodeUnpublish),
		node + "NodeGetVolumeStats":  decoded(a.nodeStats),
		node + "NodeExpandVolume":    decoded(a.nodeExpand),
	}}
}

// decoded makes a Handler of messages of one type; raw is the request.
func decoded[T any, P interface {
	*T
	proto.Message
}](h func(ctx context.Context, req P, raw []byte, next Call) ([]byte, error)) Handler {
	return func(ctx context.Context, raw []byte, next Call) ([]byte, error) {
		req := P(new(T))
		if err := proto.Unmarshal(raw, req); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "%s: %s", req.ProtoReflect().Descriptor().Name(), err)
		}
		tracing.Describe(ctx, req)
		return h(ctx, req, raw, next)
	}
}

// uncertain is an error whose code is not final: the kubelet still unpublishes when it gives up.
func uncertain(format string, args ...any) error {
	return status.Errorf(codes.Unavailable, format, args...)
}

// forward sends a changed message and decodes the answer.
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
		return nil, nil, uncertain("the driver's answer: %s", err)
	}
	return answer, raw, nil
}

// tell sends an event on a pod. It repeats a text about a thing only after a while: the API server
// forgets events after an hour.
func (a *Agent) tell(k PodKey, kind, reason, text, about string) {
	const repeat, most = 10 * time.Minute, 10_000
	text = plain.Text(text, plain.Most) // a pod's words in it can be of any length
	id := strings.Join([]string{k.UID, reason, about, text}, " ")
	a.mu.Lock()
	now := time.Now()
	again := now.Sub(a.told[id]) > repeat
	if again {
		if len(a.told) > most {
			clear(a.told)
		}
		a.told[id] = now
	}
	a.mu.Unlock()
	if again && a.Events != nil {
		a.Events.Event(&corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: k.Namespace, Name: k.Name, UID: types.UID(k.UID)},
			kind, reason, text)
	}
}

// exclusive allows one publish or unpublish of a target at a time.
func (a *Agent) exclusive(target string) (done func(), err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.calls[target] {
		return nil, status.Errorf(codes.Aborted, "%s: another call for it is under way; try again", target)
	}
	a.calls[target] = true
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.calls, target)
	}, nil
}

// fails returns an error, and sends the pod an event.
func (a *Agent) fails(k PodKey, code codes.Code, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	a.Count("failed")
	a.tell(k, corev1.EventTypeWarning, EventFailed, err.Error(), "")
	return status.Error(code, err.Error())
}

func (a *Agent) nodePublish(ctx context.Context, req *csi.NodePublishVolumeRequest, request []byte, next Call) ([]byte, error) {
	attrs := req.GetVolumeContext()
	k := PodKey{attrs[attrPodNamespace], attrs[attrPodName], attrs[attrPodUID]}
	if k.UID == "" || k.Name == "" {
		return next(ctx, request) // podInfoOnMount is off
	}
	pod, err := a.Pods.Get(ctx, k)
	if err != nil {
		// The pod's needs decide who mounts; a guess could be wrong.
		return nil, status.Errorf(codes.Unavailable, "volume %s: what pod %s/%s asks for cannot be found out: %s",
			req.GetVolumeId(), k.Namespace, k.Name, err)
	}
	if add(attrs, pod) {
		if request, err = proto.Marshal(req); err != nil {
			return nil, err
		}
	}
	target := req.GetTargetPath()
	if _, known := a.Records.Get(target); known || a.Records.Unusable(target) != nil {
		return a.publishOrDefer(ctx, req, next, pod, k, "") // whatever its RuntimeClass says by now
	}
	socket, err := a.Pods.Socket(ctx, pod)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "volume %s: the RuntimeClass of pod %s/%s: %s",
			req.GetVolumeId(), k.Namespace, k.Name, err)
	}
	if socket == "" {
		return next(ctx, request)
	}
	return a.publishOrDefer(ctx, req, next, pod, k, socket)
}

// add adds pod facts that the kubelet omits.
func add(attrs map[string]string, pod *corev1.Pod) (changed bool) {
	set := func(key, value string) {
		if _, ok := attrs[key]; !ok {
			attrs[key], changed = value, true
		}
	}
	if c := pod.Spec.SecurityContext; c != nil && c.FSGroupChangePolicy != nil {
		set(crust.ContextGroupPolicy, string(*c.FSGroupChangePolicy))
	}
	if h := pod.Spec.HostUsers; h != nil && !*h {
		set(crust.ContextHostUsers, "false")
	}
	return changed
}

// publishOrDefer publishes a volume of a pod that has a runtime. socket is used for new deferrals.
func (a *Agent) publishOrDefer(
	ctx context.Context, req *csi.NodePublishVolumeRequest, next Call, pod *corev1.Pod, k PodKey, socket string,
) ([]byte, error) {
	target := req.GetTargetPath()
	done, err := a.exclusive(target)
	if err != nil {
		return nil, err
	}
	defer done()
	a.stays(target)
	if err := a.Records.Unusable(target); err != nil {
		// Not FailedPrecondition: a kubelet would never unpublish it, see driver's notFinal.
		return nil, a.fails(k, codes.Unavailable, "volume %s: %w", req.GetVolumeId(), err)
	}
	d, known := a.Records.Get(target)
	if !known && socket == "" {
		return nil, status.Errorf(codes.Aborted, "volume %s: an unpublish of %s has just ended; try again", req.GetVolumeId(), target)
	}
	if !known {
		name := volumeName(target, req.GetVolumeCapability().GetBlock() != nil)
		d = Deferral{Pod: k, VolumeID: req.GetVolumeId(), Volume: name, Target: target, Socket: socket}
		decision, err := a.decide(ctx, req, pod, &d)
		if err != nil {
			return nil, a.fails(k, codes.Unavailable, "volume %s: it cannot be decided who mounts it: %s", name, err)
		}
		if !decision.Defer {
			return a.byHost(ctx, req, next, d, decision.Why)
		}
	}
	if placed, err := a.keptFromDriver(ctx, d); placed || err != nil {
		return nil, err // an empty message is success
	}
	if err := a.describe(ctx, req, d); err != nil {
		return nil, err
	}
	if err := failpoint.Err("agent.decided"); err != nil {
		return nil, uncertain("volume %s: %s", d.VolumeID, err)
	}
	answer, raw, err := forward[csi.NodePublishVolumeResponse](ctx, next, req)
	if err != nil {
		return nil, err
	}
	info, deferred, err := crust.MountInfoOf(answer)
	if err != nil {
		return nil, uncertain("volume %s: %s", d.VolumeID, err)
	}
	if !deferred {
		return raw, a.notDeferred(ctx, d, known)
	}
	d.Source, d.Type, d.Options = info.Source, info.Type, info.Options
	if !known {
		d.Trace = tracing.Parent(ctx)
	}
	if readOnly(req) { // whether the driver says so or not
		d.Options = onlyRead(d.Options)
	}
	return raw, a.deferred(ctx, d, known)
}

// notDeferred records that the driver has mounted the volume itself.
func (a *Agent) notDeferred(ctx context.Context, d Deferral, known bool) error {
	if known { // the driver has forgotten it
		allow, err := a.letGo(ctx, d.Target)
		defer allow()
		if err != nil {
			return err
		}
		if err := a.forget(d.Target); err != nil {
			return uncertain("volume %s: %s", d.VolumeID, err)
		}
	}
	a.mountedByHost(d, "the driver did not leave it to the runtime: its file system is none of "+strings.Join(d.Filesystems,
		", ")+", or a pod of this node has it already")
	return nil
}

// deferred records a deferral to carry out.
func (a *Agent) deferred(ctx context.Context, d Deferral, known bool) error {
	failpoint.Hit("agent.answered")
	err := a.Records.Put(d)
	if err != nil && known {
		return uncertain("volume %s: its deferral could not be written down again: %s", d.Volume, err)
	}
	if err != nil {
		// Nobody would carry it out. After this code the kubelet still unpublishes when it gives
		// up.
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unpublishTimeout)
		defer cancel()
		_, uerr := csi.NewNodeClient(a.Driver).NodeUnpublishVolume(uctx,
			&csi.NodeUnpublishVolumeRequest{VolumeId: d.VolumeID, TargetPath: d.Target})
		return a.fails(d.Pod, codes.Unavailable, "volume %s: its deferral could not be written down: %s", d.Volume, errors.Join(err, uerr))
	}
	if !known {
		a.Count("deferred")
		a.tell(d.Pod, corev1.EventTypeNormal, EventDeferred,
			fmt.Sprintf("volume %s (%s) is left to the pod's sandbox, which mounts it; the node's mount table does not show it",
				d.Volume, d.Type),
			"")
	}
	return nil
}

func (a *Agent) mountedByHost(d Deferral, why string) {
	a.Count("host")
	a.tell(d.Pod, corev1.EventTypeNormal, EventMountedByHost, fmt.Sprintf("volume %s was mounted by the host because %s", d.Volume, why),
		"")
}

func (a *Agent) byHost(ctx context.Context, req proto.Message, next Call, d Deferral, why string) ([]byte, error) {
	b, err := proto.Marshal(req)
	if err != nil {
		return nil, err
	}
	b, err = next(ctx, b)
	if err == nil {
		a.mountedByHost(d, why)
	}
	return b, err
}

func (a *Agent) nodeUnpublish(ctx context.Context, req *csi.NodeUnpublishVolumeRequest, request []byte, next Call) ([]byte, error) {
	target := req.GetTargetPath()
	done, err := a.exclusive(target)
	if err != nil {
		return nil, err
	}
	defer done()
	if a.Records.Unusable(target) == nil {
		if _, ok := a.Records.Get(target); !ok {
			return next(ctx, request)
		}
		allow, err := a.letGo(ctx, target)
		defer allow()
		if err != nil {
			return nil, err
		}
	} // otherwise the runtime is unknown; the driver checks the device, and refuses while a sandbox has it
	b, err := next(ctx, request)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(failpoint.Err("agent.unpublished"), a.forget(target)); err != nil {
		return nil, uncertain("volume %s: %s", req.GetVolumeId(), err)
	}
	return b, nil
}
