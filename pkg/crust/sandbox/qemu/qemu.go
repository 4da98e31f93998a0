// Package qemu has sandboxes that are running QEMUs: a volume is hot-plugged as
// a SCSI disk, and mounted by crust-guest with the guest's own kernel. The host's
// never looks into the file system.
package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/channel"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/qmp"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/internal/vport"
	"github.com/crust-csi/crust-csi/pkg/crust"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Bus is the SCSI bus that the QEMU must have: a virtio-scsi controller called
// crust-scsi.
const Bus = "crust-scsi.0"

// Backend knows what guests can do from those that it has met.
type Backend struct {
	dir string
	log *slog.Logger

	mu    sync.Mutex
	known guestFacts
	asked map[*box]chan struct{} // closed when the guest was asked, with or without an answer
}

// guestFacts is what the first guest said of its kernel; kept, so that it is known
// before the first sandbox of a new process is there.
type guestFacts struct {
	Kernel      string   `json:"kernel"`
	FileSystems []string `json:"fileSystems"`
	SELinux     bool     `json:"selinux,omitempty"`
}

var factsType = record.Type{Kind: "crust.guest", Version: 1}

// New takes a directory for the state.
func New(dir string, log *slog.Logger) (*Backend, error) {
	b := &Backend{dir: dir, log: log, asked: map[*box]chan struct{}{}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := factsType.Read(b.facts(), &b.known); err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("what was known of guests is forgotten", "error", err)
	}
	return b, nil
}

func (b *Backend) facts() string { return filepath.Join(b.dir, "guest"+record.Extension) }

// Kind is "qemu".
func (b *Backend) Kind() string { return "qemu" }

// Forget does nothing: what was plugged into a QEMU has ended with it.
func (b *Backend) Forget(sandbox.Spec) error { return nil }

// Close does nothing: QEMUs go on.
func (b *Backend) Close() error { return nil }

// Capabilities are those of crust-guest.
func (b *Backend) Capabilities() []crust.Capability {
	b.mu.Lock()
	defer b.mu.Unlock()
	return sandbox.BasicCapabilities(b.known.SELinux)
}

// patience is how long a guest's answer is waited for when somebody wants to know
// what guests can.
const patience = 5 * time.Second

// FileSystems waits a little for the first guest that says. Before there was any,
// nothing is known, and so nothing is promised.
func (b *Backend) FileSystems(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		b.mu.Lock()
		known := b.known
		var one chan struct{}
		for _, c := range b.asked {
			select {
			case <-c:
			default:
				one = c
			}
		}
		b.mu.Unlock()
		if known.Kernel != "" || one == nil {
			return slices.Clone(known.FileSystems), nil
		}
		// Whichever answers first: looked at again soon.
		select {
		case <-one:
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, nil
		}
	}
}

// Mounts tells what the first guest said; before, the guest that is asked to
// mount is the judge.
func (b *Backend) Mounts(fstype string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.known.Kernel == "" || slices.Contains(b.known.FileSystems, fstype)
}

func (b *Backend) ask(ctx context.Context, s *box) (guestFacts, error) {
	r, err := s.guest.Info(ctx, &guestv1.InfoRequest{})
	if err != nil {
		return guestFacts{}, err
	}
	f := guestFacts{Kernel: fmt.Sprintf("%.64q", r.GetKernel()), SELinux: r.GetSelinux()}
	// A name that a guest made up is of no use to anybody.
	for _, name := range mounter.BlockFilesystems {
		if slices.Contains(r.GetFileSystems(), name) {
			f.FileSystems = append(f.FileSystems, name)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	// What is known of this node's guests is never changed by one of them: a pod's
	// could have all later volumes mounted by the host by saying that it can
	// nothing. A guest that differs fails when it is asked to mount.
	if b.known.Kernel != "" || len(f.FileSystems) == 0 {
		return f, nil
	}
	b.known = f
	return f, factsType.Write(b.facts(), f)
}

func check(spec sandbox.Spec) error {
	if !filepath.IsAbs(spec.QMP) {
		return fault.New(fault.Invalid, "qmp_socket %q: give an absolute path", spec.QMP)
	}
	if err := channel.Check(spec.Channel); err != nil {
		return fault.New(fault.Invalid, "%w", err)
	}
	if n := len(spec.Magic); n != 0 && n != vport.MagicLength {
		return fault.New(fault.Invalid, "channel_magic has %d bytes, not %d", n, vport.MagicLength)
	}
	return nil
}

// Process asks the kernel who serves the QMP socket. A connection that breaks is
// no proof of QEMU's end; its process is.
func (b *Backend) Process(ctx context.Context, spec sandbox.Spec) (int, error) {
	if err := check(spec); err != nil {
		return 0, err
	}
	q, err := connect(ctx, spec)
	if err != nil {
		return 0, err
	}
	defer q.Close()
	pid, err := q.PID()
	if err == nil && pid == 0 {
		err = fault.New(fault.State, "the process behind %s is of another pid namespace; give its pid", spec.QMP)
	}
	return pid, err
}

func connect(ctx context.Context, spec sandbox.Spec) (*qmp.Client, error) {
	q, err := qmp.Dial(ctx, spec.QMP)
	if err != nil {
		return nil, fault.New(fault.State, "QEMU does not answer at %s: %w", spec.QMP, err)
	}
	return q, nil
}

// Open connects to a QEMU, and to the guest when that has booted.
func (b *Backend) Open(ctx context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	if err := check(o.Spec); err != nil {
		return nil, err
	}
	q, err := connect(ctx, o.Spec)
	if err != nil {
		return nil, err
	}
	conn, err := dial(o.Spec)
	if err != nil {
		return nil, errors.Join(err, q.Close())
	}
	life, end := context.WithCancel(context.Background())
	s := &box{b: b, spec: o.Spec, q: q, conn: conn, guest: guestv1.NewGuestClient(conn), gone: o.Ended, end: end}
	asked := make(chan struct{})
	b.mu.Lock()
	b.asked[s] = asked
	b.mu.Unlock()
	s.tasks.Go(func() {
		defer close(asked)
		ctx, cancel := context.WithTimeout(life, time.Minute)
		defer cancel()
		if _, err := b.ask(ctx, s); err != nil && life.Err() == nil {
			b.log.Warn("a guest does not say what it can", "sandbox_id", o.ID, "error", err)
		}
	})
	return s, nil
}

func dial(spec sandbox.Spec) (*grpc.ClientConn, error) {
	const most = 512 << 10
	return grpc.NewClient("passthrough:///guest",
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("guest"),
		// A guest is not trusted with more than this.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(most), grpc.WaitForReady(true)), grpc.WithMaxHeaderListSize(16<<10),
		// A channel that is stuck is made anew, rather than waited for.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second}, MinConnectTimeout: 5 * time.Second}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return channel.Dial(ctx, spec.Channel, spec.Magic)
		}))
}

type box struct {
	b     *Backend
	spec  sandbox.Spec
	conn  *grpc.ClientConn
	guest guestv1.GuestClient
	gone  <-chan struct{}
	end   func()
	tasks sync.WaitGroup

	mu sync.Mutex
	q  *qmp.Client
}

func (s *box) MountNamespace() string { return "" }

// qmp gives the connection to QEMU, a new one where the last has broken.
func (s *box) qmp(ctx context.Context) (*qmp.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.q.Gone():
		q, err := connect(ctx, s.spec)
		if err != nil {
			return nil, err
		}
		s.q = q
	default:
	}
	return s.q, nil
}

func (s *box) ended() bool {
	select {
	case <-s.gone:
		return true
	default:
		return false
	}
}

// said gives a guest's error its words: whose they are, and that the machine is
// gone, if it is.
func (s *box) said(err error) error {
	if err == nil {
		return nil
	}
	if code := status.Code(err); code == codes.Unavailable || code == codes.Canceled || errors.Is(err, qmp.ErrGone) || errors.Is(err, context.Canceled) {
		// A connection ended; if the machine did, that is seen in a moment.
		select {
		case <-s.gone:
		case <-time.After(time.Second):
		}
	}
	if s.ended() {
		return fault.New(fault.State, "the microVM has ended; its console says why: %s", clip(err.Error()))
	}
	// The guest chooses its words, and of codes only those that mean no more than
	// a refusal.
	switch st, ok := status.FromError(err); {
	case !ok:
		return fmt.Errorf("in the guest: %w", err)
	case st.Code() == codes.DeadlineExceeded || st.Code() == codes.Canceled || st.Code() == codes.Unavailable:
		return status.Error(st.Code(), "in the guest: "+clip(st.Message()))
	case st.Code() == codes.InvalidArgument:
		return fault.New(fault.Invalid, "in the guest: %s", clip(st.Message()))
	default:
		return fault.New(fault.State, "in the guest: %s", clip(st.Message()))
	}
}

// within runs f until the sandbox ends, or the connection to QEMU: a guest whose
// machine is gone answers nothing any more.
func (s *box) within(ctx context.Context, f func(context.Context, *qmp.Client) error) error {
	q, err := s.qmp(ctx)
	if err != nil {
		return s.said(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-s.gone:
			cancel()
		case <-q.Gone():
			cancel()
		case <-stop:
		}
	}()
	return s.said(f(ctx, q))
}

func (s *box) Publish(ctx context.Context, v sandbox.Volume) (sandbox.Place, error) {
	var r *guestv1.MountResponse
	err := s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		if err := attach(ctx, q, v); err != nil {
			return err
		}
		var err error
		r, err = s.guest.Mount(ctx, &guestv1.MountRequest{
			Serial: v.Serial(), FileSystem: v.Type, Options: v.Options.List(), ReadOnly: v.ReadOnly, Group: v.Group, GroupPolicy: string(v.Policy),
		})
		return err
	})
	return sandbox.Place{Device: clip(r.GetDevice()), Path: clip(r.GetPath())}, err
}

// clip makes a guest's text that is kept and shown plain and short.
func clip(s string) string { return plain.Text(s, plain.Most) }

func (s *box) Unpublish(ctx context.Context, v sandbox.Volume) error {
	if s.ended() {
		return nil // and all its disks with it
	}
	err := s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		disk, err := attached(ctx, q, v.Serial())
		if err != nil {
			return err
		}
		if disk {
			// Unplugging asks nobody: what is mounted then is torn off.
			if _, err := s.guest.Unmount(ctx, &guestv1.UnmountRequest{Serial: v.Serial()}); err != nil {
				return err
			}
		}
		return detach(ctx, q, v.Serial())
	})
	if s.ended() {
		return nil
	}
	return err
}

func (s *box) Stats(ctx context.Context, v sandbox.Volume) (u mounter.Usage, ailment string, err error) {
	err = s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		r, err := s.guest.Stats(ctx, &guestv1.StatsRequest{Serial: v.Serial()})
		// Never negative, whatever the guest says.
		u = mounter.Usage{
			TotalBytes: max(0, r.GetTotalBytes()), AvailableBytes: max(0, r.GetAvailableBytes()), UsedBytes: max(0, r.GetUsedBytes()),
			TotalInodes: max(0, r.GetTotalInodes()), AvailableInodes: max(0, r.GetAvailableInodes()), UsedInodes: max(0, r.GetUsedInodes()),
		}
		ailment = clip(r.GetAilment())
		return err
	})
	return u, ailment, err
}

func (s *box) Expand(ctx context.Context, v sandbox.Volume, size int64) error {
	return s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		if err := q.Run(ctx, "block_resize", map[string]any{"node-name": v.Serial(), "size": size}, nil); err != nil {
			return err
		}
		_, err := s.guest.Grow(ctx, &guestv1.GrowRequest{Serial: v.Serial(), DeviceBytes: size})
		return err
	})
}

func (s *box) Resolve(ctx context.Context, v sandbox.Volume, sub string) (path string, err error) {
	err = s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		r, err := s.guest.Resolve(ctx, &guestv1.ResolveRequest{Serial: v.Serial(), SubPath: sub})
		path = clip(r.GetPath())
		return err
	})
	return path, err
}

// Exec runs a program in the guest.
func (s *box) Exec(ctx context.Context, argv []string, stdin []byte) (output []byte, code int, err error) {
	err = s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		r, err := s.guest.Exec(ctx, &guestv1.ExecRequest{Argv: argv, Stdin: stdin})
		output, code = r.GetOutput(), int(r.GetExitCode())
		return err
	})
	return output, code, err
}

// Detach closes the connections; QEMU goes on.
func (s *box) Detach() {
	s.end()
	s.mu.Lock()
	s.q.Close()
	s.mu.Unlock()
	s.conn.Close()
	s.tasks.Wait()
	s.b.mu.Lock()
	delete(s.b.asked, s)
	s.b.mu.Unlock()
}

// Close is Detach: the QEMU is its owner's to end.
func (s *box) Close() error { s.Detach(); return nil }
