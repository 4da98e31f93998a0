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
	"github.com/crust-csi/crust-csi/internal/linux"
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
	boxes map[*box]bool
	known guestFacts
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
	b := &Backend{dir: dir, log: log, boxes: map[*box]bool{}}
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

// FileSystems asks a guest. Before there was any, nothing is known, and so
// nothing is promised.
func (b *Backend) FileSystems(ctx context.Context) ([]string, error) {
	b.mu.Lock()
	boxes := make([]*box, 0, len(b.boxes))
	for s := range b.boxes {
		boxes = append(boxes, s)
	}
	known := b.known
	b.mu.Unlock()
	if known.Kernel != "" {
		return slices.Clone(known.FileSystems), nil
	}
	for _, s := range boxes {
		if f, err := b.ask(ctx, s); err == nil {
			return f.FileSystems, nil
		}
	}
	return nil, nil
}

// vocabulary is what a guest's word is taken for: a name that it made up is of no
// use to anybody.
var vocabulary = []string{"ext2", "ext3", "ext4", "xfs", "btrfs", "vfat", "exfat", "ntfs3"}

func (b *Backend) ask(ctx context.Context, s *box) (guestFacts, error) {
	r, err := s.guest.Info(ctx, &guestv1.InfoRequest{})
	if err != nil {
		return guestFacts{}, err
	}
	f := guestFacts{Kernel: fmt.Sprintf("%.64q", r.GetKernel()), SELinux: r.GetSelinux()}
	for _, name := range vocabulary {
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

// Open connects to a QEMU, and to the guest when that has booted.
func (b *Backend) Open(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	if !filepath.IsAbs(spec.QMP) {
		return nil, fault.New(fault.Invalid, "qmp_socket %q: give an absolute path", spec.QMP)
	}
	if err := channel.Check(spec.Channel); err != nil {
		return nil, fault.New(fault.Invalid, "%w", err)
	}
	if n := len(spec.Magic); n != 0 && n != vport.MagicLength {
		return nil, fault.New(fault.Invalid, "channel_magic has %d bytes, not %d", n, vport.MagicLength)
	}
	q, err := qmp.Dial(ctx, spec.QMP)
	if errors.Is(err, linux.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.State, "%s: %w: %w", spec.QMP, sandbox.ErrGone, err)
	}
	if err != nil {
		return nil, fault.New(fault.State, "QEMU does not answer at %s: %w", spec.QMP, err)
	}
	conn, err := dial(spec)
	if err != nil {
		return nil, errors.Join(err, q.Close())
	}
	s := &box{b: b, q: q, conn: conn, guest: guestv1.NewGuestClient(conn), gone: make(chan struct{}), left: make(chan struct{})}
	var pidfd *os.File
	if spec.PID != 0 {
		if pidfd, err = linux.ProcessEnd(spec.PID); err != nil {
			return nil, errors.Join(fault.New(fault.State, "process %d of the sandbox: %w: %w", spec.PID, sandbox.ErrGone, err), q.Close(), conn.Close())
		}
	}
	b.mu.Lock()
	b.boxes[s] = true
	b.mu.Unlock()
	if pidfd != nil {
		// A QMP connection that breaks is no proof: the process is.
		wctx, cancel := context.WithCancel(context.Background())
		s.watch.Go(func() {
			defer pidfd.Close()
			if linux.WaitEnd(wctx, pidfd) {
				close(s.gone)
			}
		})
		s.watch.Go(func() { <-s.left; cancel() })
	} else {
		s.watch.Go(func() {
			select {
			case <-q.Gone():
				select {
				case <-s.left: // closed by us
				default:
					close(s.gone)
				}
			case <-s.left:
			}
		})
	}
	s.watch.Go(func() {
		actx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		stop := make(chan struct{})
		defer close(stop)
		go func() {
			select {
			case <-s.left:
				cancel()
			case <-stop:
			}
		}()
		if _, err := b.ask(actx, s); err != nil && actx.Err() == nil {
			b.log.Warn("a guest does not say what it can", "sandbox_id", spec.ID, "error", err)
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
	q     *qmp.Client
	conn  *grpc.ClientConn
	guest guestv1.GuestClient
	gone  chan struct{}
	left  chan struct{}
	once  sync.Once
	watch sync.WaitGroup
}

func (s *box) Gone() <-chan struct{}  { return s.gone }
func (s *box) MountNamespace() string { return "" }

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
	broken := status.Code(err) == codes.Unavailable
	select {
	case <-s.q.Gone():
		broken = true
	default:
	}
	if broken {
		// A connection ended; if the machine did, that is seen in a moment.
		select {
		case <-s.gone:
		case <-s.left:
		case <-time.After(time.Second):
		}
	}
	if s.ended() {
		return fault.New(fault.State, "the microVM has ended; its console says why: %s", clip(err.Error()))
	}
	// The guest chooses its words, and of codes only those that mean no more than
	// a refusal.
	switch st, ok := status.FromError(err); {
	case !ok || st.Code() == codes.DeadlineExceeded || st.Code() == codes.Canceled || st.Code() == codes.Unavailable:
		return fmt.Errorf("in the guest: %w", err)
	case st.Code() == codes.InvalidArgument:
		return fault.New(fault.Invalid, "in the guest: %s", clip(st.Message()))
	default:
		return fault.New(fault.State, "in the guest: %s", clip(st.Message()))
	}
}

// within runs f until the sandbox ends: a guest whose machine is gone answers
// nothing any more.
func (s *box) within(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-s.gone:
			cancel()
		case <-s.q.Gone():
			cancel()
		case <-stop:
		}
	}()
	return s.said(f(ctx))
}

func (s *box) Publish(ctx context.Context, v sandbox.Volume) (sandbox.Place, error) {
	var r *guestv1.MountResponse
	err := s.within(ctx, func(ctx context.Context) error {
		if err := s.attach(ctx, v); err != nil {
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

// clip bounds a guest's text that is kept and shown.
func clip(s string) string {
	const most = 1500
	return fmt.Sprintf("%.*s", most, s)
}

func (s *box) Unpublish(ctx context.Context, v sandbox.Volume) error {
	if s.ended() {
		return nil // and all its disks with it
	}
	err := s.within(ctx, func(ctx context.Context) error {
		disk, err := s.attached(ctx, v.Serial())
		if err != nil {
			return err
		}
		if disk {
			// Unplugging asks nobody: what is mounted then is torn off.
			if _, err := s.guest.Unmount(ctx, &guestv1.UnmountRequest{Serial: v.Serial()}); err != nil {
				return err
			}
		}
		return s.detach(ctx, v.Serial())
	})
	if s.ended() {
		return nil
	}
	return err
}

func (s *box) Stats(ctx context.Context, v sandbox.Volume) (u mounter.Usage, ailment string, err error) {
	err = s.within(ctx, func(ctx context.Context) error {
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

func (s *box) Expand(ctx context.Context, v sandbox.Volume, size int64) (u mounter.Usage, err error) {
	err = s.within(ctx, func(ctx context.Context) error {
		if err := s.q.Run(ctx, "block_resize", map[string]any{"node-name": v.Serial(), "size": size}, nil); err != nil {
			return err
		}
		r, err := s.guest.Grow(ctx, &guestv1.GrowRequest{Serial: v.Serial(), DeviceBytes: size})
		u.TotalBytes = max(0, r.GetTotalBytes())
		return err
	})
	return u, err
}

func (s *box) Resolve(ctx context.Context, v sandbox.Volume, sub string) (path string, err error) {
	err = s.within(ctx, func(ctx context.Context) error {
		r, err := s.guest.Resolve(ctx, &guestv1.ResolveRequest{Serial: v.Serial(), SubPath: sub})
		path = clip(r.GetPath())
		return err
	})
	return path, err
}

// Exec runs a program in the guest.
func (s *box) Exec(ctx context.Context, argv []string, stdin []byte) (output []byte, code int, err error) {
	err = s.within(ctx, func(ctx context.Context) error {
		r, err := s.guest.Exec(ctx, &guestv1.ExecRequest{Argv: argv, Stdin: stdin})
		output, code = r.GetOutput(), int(r.GetExitCode())
		return err
	})
	return output, code, err
}

// Detach closes the connections; QEMU goes on.
func (s *box) Detach() {
	s.once.Do(func() {
		close(s.left)
		s.q.Close()
		s.conn.Close()
		s.b.mu.Lock()
		delete(s.b.boxes, s)
		s.b.mu.Unlock()
	})
	s.watch.Wait()
}

// Close is Detach: the QEMU is its owner's to end.
func (s *box) Close() error { s.Detach(); return nil }
