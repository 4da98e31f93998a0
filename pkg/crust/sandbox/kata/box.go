package kata

import (
	"context"
	"errors"
	"io/fs"
	"os"
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
	f, err := linux.Open(d.Path, os.O_RDONLY|linux.OExcl)
	if errors.Is(err, linux.EBUSY) {
		return fault.New(fault.State, "%s is in use outside of this sandbox%s", d.Path, mounter.HeldBy(d).After("; "))
	}
	if err != nil {
		return err
	}
	st, err := linux.StatxFile(f)
	if err == nil && (!st.IsBlock() || st.RdevMajor != d.Major || st.RdevMinor != d.Minor) {
		err = fault.New(fault.State, "%s is no longer the block device %d:%d", d.Path, d.Major, d.Minor)
	}
	if err != nil {
		return errors.Join(err, f.Close())
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
	r, err := s.b.recordOf(v)
	if err != nil {
		return sandbox.Place{}, err
	}
	return sandbox.Place{Device: v.Device.Path, Path: v.Target, Pending: !r.taken(s.id)}, r.write()
}

func (s *box) Unpublish(_ context.Context, v sandbox.Volume) error {
	p := s.b.place(v.Target)
	inUse := func(how string) error {
		return fault.New(fault.State, "%s is in use in the sandbox (%s), and Kata takes no volume out of a running one: end the pod",
			v.Device.Path, how)
	}
	if !s.hasEnded() && p.taken(s.id) {
		return inUse("a container has started with it")
	}
	record, err := p.takeAway(v.Device.Path)
	if err != nil {
		return err
	}
	if !s.hasEnded() && s.has(v) {
		// Kata may have read the record before it was removed. It writes the sandbox's id, or opens the device, a moment later. What it
		// does between these two cannot be seen.
		how := strings.Join(mounter.UsedBy(v.Device), "; ")
		if p.taken(s.id) {
			how = "a container was starting with it"
		}
		if how != "" {
			return errors.Join(inUse(how), p.put(record))
		}
	}
	if err := p.leave(s.id); err != nil {
		return err
	}
	s.release(v)
	return nil
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

// recordOf checks the volume and returns where its record is, and what it says.
func (b *Backend) recordOf(v sandbox.Volume) (place, error) {
	if v.Group != nil && b.Runtime == Rust {
		return place{}, fault.New(fault.Invalid, "fsgroup_gid %d: Kata's runtime in Rust gives no volume to a group", *v.Group)
	}
	if v.Options.Labels() {
		return place{}, fault.New(fault.Invalid, "mount_options %q: the kernel of Kata's guests has no SELinux", v.Options.List())
	}
	request := engine.Request{Device: v.Device, Type: v.Type, Options: v.Options, Group: v.Group}
	if _, err := request.Identify(); err != nil {
		return place{}, err
	}
	options, err := request.SuperblockOptions()
	if err != nil {
		return place{}, err
	}
	r := b.place(v.Target)
	if r.info, err = describe(v, options.List()); errors.Is(err, fs.ErrNotExist) {
		err = fault.New(fault.State, "%w", err)
	}
	return r, err
}
