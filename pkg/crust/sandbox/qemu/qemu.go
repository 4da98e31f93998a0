// Package qemu has sandboxes that are running QEMUs: a volume is hot-plugged as
// a SCSI disk, and mounted by crust-guest with the guest's own kernel. The host's
// never looks into the file system.
package qemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/crust"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
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

// New takes a directory for the state. A nil log is nobody's.
func New(dir string, log *slog.Logger) (*Backend, error) {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
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

// askAgain is the pause after a guest did not say what it can: it may boot for longer than an answer is waited for.
const askAgain = 5 * time.Second

func (b *Backend) askOnce(ctx context.Context, s *box) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err := b.ask(ctx, s)
	return err
}

// knows tells whether some guest has said what guests can.
func (b *Backend) knows() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.known.Kernel != ""
}

func (b *Backend) ask(ctx context.Context, s *box) (guestFacts, error) {
	r, err := s.guest.Info(ctx, &guestv1.InfoRequest{})
	if err != nil {
		return guestFacts{}, err
	}
	f := guestFacts{Kernel: fmt.Sprintf("%.64q", r.GetKernel()), SELinux: r.GetSelinux()}
	// A name that a guest made up is of no use to anybody.
	for _, name := range fstype.OnDevices() {
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

// Process asks the kernel who serves the QMP socket. A connection that breaks is
// no proof of QEMU's end; its process is.
func (b *Backend) Process(ctx context.Context, spec sandbox.Spec) (int, error) {
	how, err := reach(spec)
	if err != nil {
		return 0, err
	}
	q, err := how.connect(ctx)
	if err != nil {
		return 0, err
	}
	defer q.Close()
	pid, err := q.PID()
	if err == nil && pid == 0 {
		err = fault.New(fault.State, "the process behind %s is of another pid namespace; give its pid", how.QMP)
	}
	return pid, err
}

// Open connects to a QEMU, and to the guest when that has booted.
func (b *Backend) Open(ctx context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	how, err := reach(o.Spec)
	if err != nil {
		return nil, err
	}
	q, err := how.connect(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := how.dial()
	if err != nil {
		return nil, errors.Join(err, q.Close())
	}
	life, end := context.WithCancel(context.Background())
	s := &box{b: b, how: how, q: q, conn: conn, guest: guestv1.NewGuestClient(conn), gone: o.Ended, end: end}
	asked := make(chan struct{})
	b.mu.Lock()
	b.asked[s] = asked
	b.mu.Unlock()
	s.tasks.Go(func() {
		err := b.askOnce(life, s)
		close(asked)
		for ; err != nil && life.Err() == nil && !b.knows(); err = b.askOnce(life, s) {
			b.log.Warn("a guest does not say what it can; it is asked again", "sandbox_id", o.ID, "error", err)
			select {
			case <-life.Done():
			case <-time.After(askAgain):
			}
		}
	})
	return s, nil
}

// Close is Detach: the QEMU is its owner's to end.
func (s *box) Close() error { s.Detach(); return nil }
