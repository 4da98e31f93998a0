package kata

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// box is one sandbox of Kata.
type box struct {
	b     *Backend
	id    string
	ended <-chan struct{}

	mu    sync.Mutex
	holds map[string]bool // devices, by path
}

func (s *box) MountNamespace() string { return "" }
func (s *box) Close() error           { s.Detach(); return nil }

func (s *box) hasEnded() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// Detach lets go of the devices. The next process holds them again.
func (s *box) Detach() {
	s.b.mu.Lock()
	delete(s.b.boxes, s.id)
	s.b.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for path := range s.holds {
		s.b.release(path)
	}
	clear(s.holds)
}

// hold keeps everybody else on this host from the device (open(2), O_EXCL). Kata's hypervisor opens it without that.
func (s *box) hold(v sandbox.Volume) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holds[v.Device.Path] {
		return nil
	}
	if err := s.b.hold(v.Device); err != nil {
		return err
	}
	s.holds[v.Device.Path] = true
	return nil
}

// has tells whether the sandbox holds the device. Without that, Kata was told of no volume.
func (s *box) has(v sandbox.Volume) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holds[v.Device.Path]
}

func (s *box) release(v sandbox.Volume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holds[v.Device.Path] {
		delete(s.holds, v.Device.Path)
		s.b.release(v.Device.Path)
	}
}

func (b *Backend) hold(d mounter.Device) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if have := b.held[d.Path]; have != nil { // of another sandbox, which only reads it as this one does
		have.users++
		return nil
	}
	f, err := mounter.Hold(d)
	if errors.Is(err, linux.EBUSY) {
		return fault.New(fault.State, "%s is in use outside of this sandbox%s", d.Path, mounter.HeldBy(d).After("; "))
	}
	if err != nil {
		return err
	}
	b.held[d.Path] = &device{f, 1}
	return nil
}

func (b *Backend) release(path string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	have := b.held[path]
	if have.users--; have.users == 0 {
		delete(b.held, path)
		have.Close()
	}
}

func (s *box) Publish(_ context.Context, v sandbox.Volume) (sandbox.Place, error) {
	if s.hasEnded() {
		return sandbox.Place{}, fault.New(fault.State, "the sandbox has ended")
	}
	if err := s.hold(v); err != nil {
		return sandbox.Place{}, err
	}
	if err := s.b.check(v); err != nil {
		return sandbox.Place{}, err
	}
	record, err := recordOf(v)
	if err != nil {
		return sandbox.Place{}, err
	}
	p := s.b.place(v.Target)
	return sandbox.Place{Device: v.Device.Path, Path: v.Target, Pending: !p.taken(s.id)}, p.write(s.id, record)
}

func (s *box) Unpublish(_ context.Context, v sandbox.Volume) error {
	p := s.b.place(v.Target)
	record, err := recordOf(v)
	if err != nil {
		return err
	}
	if s.hasEnded() {
		// The process that ended may have been Kata's shim, and its hypervisor may live on.
		if by := s.usedBy(v); by.Public != "" {
			return fault.New(fault.State, "the sandbox has ended, and %s is still in use%s", v.Device.Path, by.After("; "))
		}
		_, err = p.takeAway(record)
	} else if s.has(v) {
		err = s.takeBack(p, v, record)
	}
	if err == nil {
		err = p.leave(s.id)
	}
	if err == nil {
		s.release(v)
	}
	return err
}

// takeBack takes the record of a volume that is pending away from Kata.
func (s *box) takeBack(p place, v sandbox.Volume, record []byte) error {
	inUse := func(by fault.Private) error {
		return fault.New(fault.State, "%s is in use in this sandbox or another%s; end the pod, for no call of Kata takes a volume out of a "+
			"running microVM", v.Device.Path, by.After(": "))
	}
	const started = "a container was started with it, or is being started"
	switch {
	case s.b.Runtime == Rust && p.has(record):
		return inUse(fault.Private{Public: "Kata's runtime in Rust does not tell whether a container was started with it"})
	case p.taken(s.id):
		return inUse(fault.Private{Public: started})
	}
	if by := s.usedBy(v); by.Public != "" {
		return inUse(by)
	}
	was, err := p.takeAway(record)
	if err != nil {
		return err
	}
	// Kata may have read the record before it was removed. It writes the sandbox's id, or opens the device, a moment later. What it does
	// between these two cannot be seen.
	by := s.usedBy(v)
	if p.taken(s.id) {
		by = fault.Private{Public: started}
	}
	if by.Public == "" {
		return nil
	}
	err = inUse(by)
	if was {
		err = errors.Join(err, p.putBack(record))
	}
	return err
}

// usedBy says who has the device beside this server: Kata's hypervisor, for its open(2) is not exclusive. If other sandboxes of the server
// read the device, they are who, and it is empty.
func (s *box) usedBy(v sandbox.Volume) fault.Private {
	s.b.mu.Lock()
	have := s.b.held[v.Device.Path]
	shared := have != nil && have.users > 1
	s.b.mu.Unlock()
	if shared {
		return fault.Private{}
	}
	users := mounter.UsedBy(v.Device)
	if len(users) == 0 {
		return fault.Private{}
	}
	return fault.Private{Public: "a process has it open, and the log says which", Detail: strings.Join(users, "; ")}
}

func (s *box) Resolve(_ context.Context, v sandbox.Volume, sub string) (string, error) {
	if sub != "" {
		return "", fault.New(fault.State, "%s of volume %s: Kata has no directories of a volume, only all of it", sub, v.Device.Path)
	}
	return v.Target, nil // Kata finds its record by that
}

func (s *box) Stats(ctx context.Context, v sandbox.Volume) (mounter.Usage, string, error) {
	if s.b.Runtime == Rust {
		return mounter.Usage{}, "", fault.New(fault.State, "Kata's runtime in Rust tells no statistics of a volume")
	}
	if err := s.running(v); err != nil {
		return mounter.Usage{}, "", err
	}
	return s.b.socket(s.id).stats(ctx, v.Device.Path)
}

// Expand asks Kata's agent to grow the file system. No released agent does, so that VOLUME_RESIZE is not among the Capabilities.
func (s *box) Expand(ctx context.Context, v sandbox.Volume, size int64) error {
	if err := s.running(v); err != nil {
		return err
	}
	return s.b.socket(s.id).resize(ctx, v.Device.Path, size)
}

func (s *box) running(v sandbox.Volume) error {
	if s.b.place(v.Target).taken(s.id) {
		return nil
	}
	return fault.New(fault.Unavailable, "%s is mounted when a container of the sandbox starts", v.Device.Path)
}

// check refuses what Kata cannot do with a volume, and what is not on its device.
func (b *Backend) check(v sandbox.Volume) error {
	switch {
	case v.Group != nil && b.Runtime == Rust:
		return fault.New(fault.Invalid, "fsgroup_gid %d: Kata's runtime in Rust gives no volume to a group", *v.Group)
	case v.ReadOnly && !v.Device.ReadOnly && b.Runtime == Rust:
		return fault.New(fault.Invalid, "%s can be written to: Kata's runtime in Rust makes no device read-only for a guest", v.Device.Path)
	case v.Options.Labels():
		return fault.New(fault.Invalid, "mount_options %q: the kernel of Kata's guests has no SELinux", v.Options.List())
	}
	_, err := engine.Request{Device: v.Device, Type: v.Type}.Identify()
	return err
}

// recordOf returns Kata's record of a volume, the same for the same volume.
func recordOf(v sandbox.Volume) ([]byte, error) {
	options, err := engine.Request{Type: v.Type, Options: v.Options, Group: v.Group}.SuperblockOptions()
	if err != nil {
		return nil, err
	}
	return describe(v, options.List())
}
