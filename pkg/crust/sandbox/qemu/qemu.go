// Package qemu is the backend for QEMU microVMs. A volume is hot-plugged as a SCSI disk, and
// crust-guest mounts it with the guest's own kernel. The host's kernel never parses the file
// system.
package qemu

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-csi/crust-csi/internal/qmp"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/crust"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Bus is the SCSI bus that QEMU must have: a virtio-scsi controller called crust-scsi.
const Bus = qmp.Bus

// Backend learns the guests' capabilities from the first guest that reports them.
type Backend struct {
	dir     string
	timeout time.Duration
	log     *slog.Logger

	mu     sync.Mutex
	known  guestFacts
	unread error                      // why the record of known cannot be used; nil if it can
	asked  map[*machine]chan struct{} // closed after the first query, answered or not
}

// guestFacts is what the first guest reported of its kernel. It is stored, so that a new process
// knows it before it has a sandbox.
type guestFacts struct {
	Kernel      string   `json:"kernel"`
	FileSystems []string `json:"fileSystems"`
	SELinux     bool     `json:"selinux,omitempty"`
}

var factsType = record.Type{Kind: "crust.guest", Version: 1}

// New keeps the backend's state in dir. The timeout is the longest that a guest may take for an answer, as sandbox.Config.Timeout; 0 is a
// minute. log may be nil.
func New(dir string, timeout time.Duration, log *slog.Logger) (*Backend, error) {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	b := &Backend{dir: dir, timeout: cmp.Or(timeout, time.Minute), log: log, asked: map[*machine]chan struct{}{}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	var f guestFacts
	switch err := factsType.Read(b.facts(), &f); {
	case err == nil:
		b.known = f
	case !errors.Is(err, fs.ErrNotExist):
		b.unread = fmt.Errorf("%w; or remove it while no sandbox is there", record.Unusable(err))
		log.Error("what guests can mount is not known", "error", b.unread)
	}
	return b, nil
}

func (b *Backend) facts() string { return filepath.Join(b.dir, "guest"+record.Extension) }

// Know reads the guests' capabilities from a file of their image, so that volumes are deferred to the first guest, too. It discards what a
// guest with another kernel reported.
func (b *Backend) Know(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var f guestFacts
	if err := json.Unmarshal(text, &f); err != nil || f.Kernel == "" || len(f.FileSystems) == 0 {
		return fmt.Errorf("%s does not say what the guest can: %w", file, cmp.Or(err, errors.New("no kernel, or no file systems")))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	f.Kernel = fmt.Sprintf("%.64q", f.Kernel)
	if b.known.Kernel == f.Kernel && b.unread == nil {
		return nil
	}
	b.known, b.unread = f, nil
	return factsType.Write(b.facts(), f)
}

// Kind is "qemu".
func (b *Backend) Kind() string { return "qemu" }

// Forget does nothing: everything plugged into a QEMU ends with it.
func (b *Backend) Forget(sandbox.Spec) error { return nil }

// Close does nothing: QEMUs go on.
func (b *Backend) Close() error { return nil }

// Capabilities are those of crust-guest.
func (b *Backend) Capabilities() []crust.Capability {
	b.mu.Lock()
	defer b.mu.Unlock()
	return sandbox.BasicCapabilities(b.known.SELinux)
}

// patience bounds how long FileSystems waits for a guest's answer.
const patience = 5 * time.Second

// FileSystems waits up to patience for the first guest's report. Without one it returns none, so
// nothing is promised.
func (b *Backend) FileSystems(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		b.mu.Lock()
		if err := b.unread; err != nil {
			b.mu.Unlock()
			return nil, err // "not known" is not "none": the node would mount what its guests should
		}
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
		// Look again soon: any guest may answer.
		select {
		case <-one:
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, nil
		}
	}
}

// Mounts uses the first guest's report. Without one it returns true; the mounting guest decides.
func (b *Backend) Mounts(fstype string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.known.Kernel == "" || slices.Contains(b.known.FileSystems, fstype)
}

// Grows reports whether crust-guest can grow the file system. It has every capability that this needs.
func (b *Backend) Grows(name string) bool { return fstype.Of(name).Grow != nil }

// askAgain is the pause after a guest did not report: it may boot for longer than a query waits.
const askAgain = 5 * time.Second

func (b *Backend) askOnce(ctx context.Context, s *machine) error {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	_, err := b.ask(ctx, s)
	return err
}

// knows tells whether some guest has reported.
func (b *Backend) knows() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.known.Kernel != ""
}

func (b *Backend) ask(ctx context.Context, s *machine) (guestFacts, error) {
	r, err := s.guest.Info(ctx, &guestv1.InfoRequest{}, grpc.MaxCallRecvMsgSize(mostOfReport))
	if err != nil {
		return guestFacts{}, err
	}
	f := guestFacts{Kernel: fmt.Sprintf("%.64q", r.GetKernel()), SELinux: r.GetSelinux()}
	// Drop names that the guest made up.
	for _, name := range fstype.OnDevices() {
		if slices.Contains(r.GetFileSystems(), name) {
			f.FileSystems = append(f.FileSystems, name)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	// A guest never changes this node's data about its guests. Otherwise a pod's guest could make
	// the host mount all later volumes by reporting no file systems. A guest that differs fails
	// when it has to mount.
	if b.known.Kernel != "" || len(f.FileSystems) == 0 || b.unread != nil {
		return f, nil
	}
	b.known = f
	return f, factsType.Write(b.facts(), f)
}

// Process asks the kernel who serves the QMP socket. A broken connection does not prove QEMU's end;
// its process does.
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

// Open connects to a QEMU, and to its guest once that has booted.
func (b *Backend) Open(ctx context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	how, err := reach(o.Spec)
	if err != nil {
		return nil, err
	}
	q, err := how.connect(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := how.dial(b.timeout)
	if err != nil {
		return nil, errors.Join(err, q.Close())
	}
	life, end := context.WithCancel(context.Background())
	s := &machine{b: b, how: how, pid: o.PID, q: q, conn: conn, guest: guestv1.NewGuestClient(conn), gone: o.Ended, end: end}
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

// Close is Detach: the owner ends the QEMU.
func (s *machine) Close() error { s.Detach(); return nil }
