package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/qmp"
	"github.com/crust-csi/crust-csi/internal/tracing"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

type machine struct {
	b     *Backend
	how   registration
	pid   int // QEMU's
	conn  *grpc.ClientConn
	guest guestv1.GuestClient
	gone  <-chan struct{}
	end   func()
	tasks sync.WaitGroup

	mu       sync.Mutex
	q        *qmp.Client
	detached bool
}

func (s *machine) MountNamespace() string { return "" }

var errDetached = fault.New(fault.State, "the sandbox was deregistered, or this server is stopping")

// qmp returns the connection to QEMU. It reconnects if the last one broke, but not after Detach.
func (s *machine) qmp(ctx context.Context) (*qmp.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.detached {
		return nil, errDetached
	}
	select {
	case <-s.q.Gone():
		q, err := s.how.connect(ctx)
		if err != nil {
			return nil, err
		}
		s.q = q
	default:
	}
	return s.q, nil
}

func (s *machine) ended() bool {
	select {
	case <-s.gone:
		return true
	default:
		return false
	}
}

// explain marks an error as the guest's, or reports that the machine is gone.
func (s *machine) explain(err error) error {
	if err == nil {
		return nil
	}
	if code := status.Code(err); code == codes.Unavailable || code == codes.Canceled || errors.Is(err, qmp.ErrGone) ||
		errors.Is(err, context.Canceled) {
		// The connection broke. If the machine ended, that shows in a moment; QEMU closes its own
		// socket first.
		patience := time.Second
		if errors.Is(err, qmp.ErrGone) {
			patience = 10 * time.Second
		}
		select {
		case <-s.gone:
		case <-time.After(patience):
		}
	}
	if s.ended() {
		return fault.New(fault.State, "the microVM has ended; its console says why: %s", clip(err.Error()))
	}
	// The guest controls the text, and of the codes only those that mean a refusal.
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

// within runs f until the sandbox or the connection to QEMU ends: a guest whose machine is gone
// never answers.
func (s *machine) within(ctx context.Context, f func(context.Context, *qmp.Client) error) error {
	q, err := s.qmp(ctx)
	if errors.Is(err, errDetached) {
		return err
	}
	if err != nil {
		return s.explain(err)
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
	return s.explain(f(ctx, q))
}

// plug gives the guest the volume as a disk. Nobody else on the host may use the device, except machines that only read it: they share the
// claim of the first.
func (s *machine) plug(ctx context.Context, q *qmp.Client, v sandbox.Volume) error {
	d := qmp.Disk{Name: v.Serial(), Path: v.Device.Path, Major: v.Device.Major, Minor: v.Device.Minor,
		ReadOnly: v.ReadOnly || v.Device.ReadOnly}
	if d.File = s.b.claimed(ctx, v.Readers, d); d.File != nil {
		defer d.File.Close()
	}
	return q.Plug(ctx, d)
}

// claimed returns the descriptor of a disk that one of these machines reads, nil if there is none.
func (b *Backend) claimed(ctx context.Context, readers []sandbox.Sandbox, d qmp.Disk) *os.File {
	for _, r := range readers {
		m, ok := r.(*machine)
		if !ok {
			continue // it cannot be reached
		}
		var f *os.File
		ctx, cancel := context.WithTimeout(ctx, patience)
		err := m.within(ctx, func(ctx context.Context, q *qmp.Client) (err error) {
			f, err = q.File(ctx, m.pid, d)
			return err
		})
		cancel()
		if err != nil {
			b.log.Warn("whether a microVM reads a device cannot be told", "device", d.Path, "pid", m.pid, "error", err)
		}
		if f != nil {
			return f
		}
	}
	return nil
}

func (s *machine) Publish(ctx context.Context, v sandbox.Volume) (sandbox.Place, error) {
	var r *guestv1.MountResponse
	err := s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		actx, end := tracing.Begin(ctx, "plug in disk")
		err := s.plug(actx, q, v)
		end(err)
		if err != nil {
			return err
		}
		r, err = s.guest.Mount(ctx, &guestv1.MountRequest{
			Serial: v.Serial(), FileSystem: v.Type, Options: v.Options.List(), ReadOnly: v.ReadOnly, Group: v.Group,
			GroupPolicy: string(v.Policy),
		})
		return err
	})
	return sandbox.Place{Device: plain.Text(r.GetDevice(), longest), Path: plain.Text(r.GetPath(), longest)}, err
}

// longest bounds a place that a guest names, in bytes: it is stored in the sandbox's record, once
// for each volume.
const longest = 200

// clip makes a guest's text plain and short.
func clip(s string) string { return plain.Text(s, plain.Most) }

func (s *machine) Unpublish(ctx context.Context, v sandbox.Volume) error {
	if s.ended() {
		return nil // its disks have gone with it
	}
	err := s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		plugged, err := q.Plugged(ctx, v.Serial())
		if err != nil {
			return err
		}
		if plugged {
			// Unplugging asks nobody: a mounted disk would be cut off.
			if _, err := s.guest.Unmount(ctx, &guestv1.UnmountRequest{Serial: v.Serial()}); err != nil {
				return err
			}
		}
		return q.Unplug(ctx, v.Serial())
	})
	if s.ended() {
		return nil
	}
	return err
}

func (s *machine) Stats(ctx context.Context, v sandbox.Volume) (u mounter.Usage, ailment string, err error) {
	err = s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		r, err := s.guest.Stats(ctx, &guestv1.StatsRequest{Serial: v.Serial()})
		// A guest may send negative numbers.
		u = mounter.Usage{
			TotalBytes: max(0, r.GetTotalBytes()), AvailableBytes: max(0, r.GetAvailableBytes()), UsedBytes: max(0, r.GetUsedBytes()),
			TotalInodes: max(0, r.GetTotalInodes()), AvailableInodes: max(0, r.GetAvailableInodes()), UsedInodes: max(0, r.GetUsedInodes()),
		}
		ailment = clip(r.GetAilment())
		return err
	})
	return u, ailment, err
}

func (s *machine) Expand(ctx context.Context, v sandbox.Volume, size int64) error {
	return s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		if err := q.Resize(ctx, v.Serial(), size); err != nil {
			return err
		}
		_, err := s.guest.Grow(ctx, &guestv1.GrowRequest{Serial: v.Serial(), DeviceBytes: size})
		return err
	})
}

func (s *machine) Resolve(ctx context.Context, v sandbox.Volume, sub string) (path string, err error) {
	err = s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		r, err := s.guest.Resolve(ctx, &guestv1.ResolveRequest{Serial: v.Serial(), SubPath: sub})
		path = clip(r.GetPath())
		return err
	})
	return path, err
}

// PrepareSlot is the guest's.
func (s *machine) PrepareSlot(ctx context.Context, slot string) (path string, err error) {
	err = s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		r, err := s.guest.PrepareSlot(ctx, &guestv1.PrepareSlotRequest{Slot: slot})
		path = clip(r.GetPath())
		return err
	})
	return path, err
}

// Bind is the guest's.
func (s *machine) Bind(ctx context.Context, slot string, v sandbox.Volume, sub string, readOnly bool) error {
	return s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		_, err := s.guest.Bind(ctx, &guestv1.BindRequest{Slot: slot, Serial: v.Serial(), SubPath: sub, ReadOnly: readOnly})
		if status.Code(err) == codes.AlreadyExists { // no other call of a guest may say so
			err = fault.New(fault.Exists, "%s", clip(status.Convert(err).Message()))
		}
		return err
	})
}

// Unbind is the guest's.
func (s *machine) Unbind(ctx context.Context, slot string) error {
	if s.ended() {
		return nil // its slots have gone with it
	}
	return s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		_, err := s.guest.Unbind(ctx, &guestv1.UnbindRequest{Slot: slot})
		return err
	})
}

// Exec runs a program in the guest.
func (s *machine) Exec(ctx context.Context, argv []string, stdin []byte) (output []byte, code int, err error) {
	err = s.within(ctx, func(ctx context.Context, q *qmp.Client) error {
		r, err := s.guest.Exec(ctx, &guestv1.ExecRequest{Argv: argv, Stdin: stdin}, grpc.MaxCallRecvMsgSize(mostOfOutput))
		output, code = r.GetOutput(), int(r.GetExitCode())
		return err
	})
	return output, code, err
}

// Detach closes the connections. QEMU goes on.
func (s *machine) Detach() {
	s.end()
	s.mu.Lock()
	s.detached = true
	s.q.Close()
	s.mu.Unlock()
	s.conn.Close()
	s.tasks.Wait()
	s.b.mu.Lock()
	delete(s.b.asked, s)
	s.b.mu.Unlock()
}
