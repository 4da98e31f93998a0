package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/guestdisks"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// server mounts volumes at DIR/volumes/SERIAL. It keeps no state: the kernel knows what is mounted,
// so the agent may be killed and restarted.
type server struct {
	guestv1.UnimplementedGuestServer
	dir   string
	root  *mounter.Root
	slots engine.Slots
}

func newServer(dir string) (*server, error) {
	volumes := filepath.Join(dir, "volumes")
	if err := os.MkdirAll(volumes, 0o755); err != nil {
		return nil, err
	}
	root, err := mounter.OpenRoot(volumes)
	return &server{dir: dir, root: root, slots: engine.Slots{Dir: filepath.Join(dir, "slots")}}, err
}

var serialPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,35}$`)

func (s *server) target(serial string) (*mounter.Target, error) {
	if !serialPattern.MatchString(serial) {
		return nil, fault.New(fault.Invalid, "serial %q", serial)
	}
	return s.root.Target(filepath.Join(s.root.Path(), serial))
}

func (s *server) Info(context.Context, *guestv1.InfoRequest) (*guestv1.InfoResponse, error) {
	systems, err := mounter.Mountable()
	if err != nil {
		return nil, err
	}
	r := &guestv1.InfoResponse{Kernel: linux.Uname(), FileSystems: systems, Selinux: mounter.SELinux().Answer == mounter.Yes}
	all, err := guestdisks.All()
	if err != nil {
		return nil, err
	}
	for name, serial := range all {
		if t, err := s.target(serial); err == nil {
			if st, err := t.Glance(); err == nil {
				if st.Occupant == mounter.MountPoint {
					r.Volumes = append(r.Volumes, &guestv1.MountedVolume{Serial: serial, Path: t.Path, Device: "/dev/" + name})
				}
				st.Close()
			}
			t.Close()
		}
	}
	return r, nil
}

func (s *server) Mount(ctx context.Context, r *guestv1.MountRequest) (*guestv1.MountResponse, error) {
	t, err := s.target(r.GetSerial())
	if err != nil {
		return nil, err
	}
	defer t.Close()
	o, err := mounter.ParseOptions(r.GetOptions())
	if err != nil {
		return nil, err
	}
	measured := steps{since: time.Now()}
	found := measured.begin(stepDevice)
	d, err := guestdisks.Find(ctx, r.GetSerial())
	found(err)
	if err != nil {
		return nil, err
	}
	resp := &guestv1.MountResponse{Path: t.Path, Device: d.Path}
	defer func() {
		if r.GetReportSteps() {
			resp.Steps = measured.list
		}
	}()
	if mounted, err := showing(t, d); err != nil || mounted {
		return resp, err
	}
	m, err := engine.Open(ctx, engine.Request{
		Device: d, Type: r.GetFileSystem(), Options: o, ReadOnly: r.GetReadOnly(), Group: r.Group,
		Policy:  ownership.Policy(r.GetGroupPolicy()),
		Scratch: filepath.Join(s.dir, "scratch", r.GetSerial()), Step: measured.begin,
	})
	if err != nil {
		return nil, err
	}
	defer m.Close()
	if err := failpoint.Err("guest.opened"); err != nil {
		return nil, err
	}
	if err := m.Attach(t); err != nil {
		return nil, err
	}
	return resp, failpoint.Err("guest.attached")
}

// showing reports whether the target shows the device.
func showing(t *mounter.Target, d mounter.Device) (bool, error) {
	st, err := t.Glance()
	if err != nil {
		return false, err
	}
	defer st.Close()
	if st.Occupant != mounter.MountPoint {
		return false, nil
	}
	have, ok, err := st.Device()
	if err == nil && (!ok || !have.Same(d)) {
		err = fault.New(fault.State, "%s shows another device", t.Path)
	}
	return err == nil, err
}

func (s *server) Unmount(ctx context.Context, r *guestv1.UnmountRequest) (*guestv1.UnmountResponse, error) {
	t, err := s.target(r.GetSerial())
	if err != nil {
		return nil, err
	}
	defer t.Close()
	err = s.empty(r.GetSerial()) // without a wait: what a container uses there, it uses for long
	if err == nil {
		err = s.unbind(r.GetSerial())
	}
	if err := errors.Join(err, failpoint.Err("guest.unbound")); err != nil {
		return nil, err
	}
	for {
		st, err := t.Glance()
		if err != nil {
			return nil, err
		}
		mounted := st.Occupant == mounter.MountPoint
		st.Close()
		if !mounted {
			break
		}
		if err := t.Unmount(); err == nil {
			continue
		} else if !fault.Is(err, fault.State) || ctx.Err() != nil {
			return nil, err
		}
		// In use: allow a moment for users that are about to leave.
		select {
		case <-ctx.Done():
			return nil, fault.New(fault.State, "%s is in use in the guest", t.Path)
		case <-time.After(20 * time.Millisecond):
		}
	}
	// Bind needs what was just unmounted. A call of it that came before may have been late.
	if err := errors.Join(failpoint.Err("guest.unmounted"), s.empty(r.GetSerial())); err != nil {
		return nil, err
	}
	if err := t.Remove(); err != nil {
		return nil, err
	}
	// The host unplugs the disk next.
	all, err := guestdisks.All()
	if err != nil {
		return nil, err
	}
	for name, have := range all {
		if have != r.GetSerial() {
			continue
		}
		busy, err := mounter.Busy("/dev/" + name)
		if busy {
			err = fault.New(fault.State, "/dev/%s is still in use in the guest", name)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, linux.ENXIO) && !errors.Is(err, linux.ENODEV) {
			return nil, err
		}
	}
	return &guestv1.UnmountResponse{}, nil
}

func (s *server) mounted(serial string, f func(*mounter.State, mounter.Device) error) error {
	t, err := s.target(serial)
	if err != nil {
		return err
	}
	defer t.Close()
	st, err := t.Glance()
	if err != nil {
		return err
	}
	defer st.Close()
	if st.Occupant != mounter.MountPoint {
		return fault.New(fault.State, "the volume %s is not mounted in the guest", serial)
	}
	d, ok, err := st.Device()
	if err != nil || !ok {
		return errors.Join(fault.New(fault.State, "the volume %s shows no device", serial), err)
	}
	all, err := guestdisks.All()
	if err != nil {
		return err
	}
	for name, have := range all {
		if have == serial {
			d.Path = "/dev/" + name
		}
	}
	return f(st, d)
}

func (s *server) Stats(_ context.Context, r *guestv1.StatsRequest) (*guestv1.StatsResponse, error) {
	resp := &guestv1.StatsResponse{}
	return resp, s.mounted(r.GetSerial(), func(st *mounter.State, d mounter.Device) error {
		var said []string
		for _, a := range st.Ailments(d) {
			said = append(said, a.Message)
		}
		resp.Ailment = strings.Join(said, "; ")
		u, err := st.Usage()
		resp.TotalBytes, resp.AvailableBytes, resp.UsedBytes = u.TotalBytes, u.AvailableBytes, u.UsedBytes
		resp.TotalInodes, resp.AvailableInodes, resp.UsedInodes = u.TotalInodes, u.AvailableInodes, u.UsedInodes
		return err
	})
}

func (s *server) Grow(ctx context.Context, r *guestv1.GrowRequest) (*guestv1.GrowResponse, error) {
	resp := &guestv1.GrowResponse{}
	return resp, s.mounted(r.GetSerial(), func(st *mounter.State, d mounter.Device) error {
		for {
			size, err := mounter.DeviceSize(d)
			if err != nil {
				return err
			}
			if size >= r.GetDeviceBytes() {
				break
			}
			// The kernel gets an event; an explicit rescan does no harm.
			_ = os.WriteFile("/sys/block/"+filepath.Base(d.Path)+"/device/rescan", []byte("1"), 0)
			select {
			case <-ctx.Done():
				return fault.New(fault.State, "the guest's %s has %d bytes and does not become %d: %w", d.Path, size,
					r.GetDeviceBytes(), ctx.Err())
			case <-time.After(5 * time.Millisecond):
			}
		}
		m, err := st.Mount()
		if err != nil {
			return err
		}
		return engine.Grow(st, m.Type, d)
	})
}

func (s *server) Resolve(_ context.Context, r *guestv1.ResolveRequest) (*guestv1.ResolveResponse, error) {
	resp := &guestv1.ResolveResponse{}
	return resp, s.mounted(r.GetSerial(), func(st *mounter.State, _ mounter.Device) error {
		if r.GetSubPath() == "" {
			resp.Path = filepath.Join(s.root.Path(), r.GetSerial())
			return nil
		}
		return engine.SubPath(st, r.GetSubPath(), func(f *os.File) (err error) {
			resp.Path, err = mounter.BindAt(f, filepath.Join(s.dir, "binds", r.GetSerial()), engine.Name(r.GetSubPath()))
			return err
		})
	})
}

// unbind unmounts the sub-paths of a volume that were bound.
func (s *server) unbind(serial string) error {
	dir := filepath.Join(s.dir, "binds", serial)
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, n := range names {
		path := filepath.Join(dir, n.Name())
		if err := linux.Unmount(path); err != nil && !errors.Is(err, linux.EINVAL) {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	return os.Remove(dir)
}

func (s *server) Exec(ctx context.Context, r *guestv1.ExecRequest) (*guestv1.ExecResponse, error) {
	if len(r.GetArgv()) == 0 {
		return nil, fault.New(fault.Invalid, "no program was named")
	}
	const most = 200 << 10
	c := exec.CommandContext(ctx, r.GetArgv()[0], r.GetArgv()[1:]...)
	c.Stdin = bytes.NewReader(r.GetStdin())
	c.WaitDelay = time.Second
	out, err := c.CombinedOutput()
	if len(out) > most {
		out = append(out[:most], []byte(fmt.Sprintf("\n(%d more bytes)\n", len(out)-most))...)
	}
	resp := &guestv1.ExecResponse{Output: out}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		resp.ExitCode = int32(exit.ExitCode())
	case err != nil && !errors.Is(err, exec.ErrWaitDelay):
		return nil, fault.New(fault.State, "%s: %w", r.GetArgv()[0], err)
	}
	return resp, nil
}
