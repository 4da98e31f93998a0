// Package podguest runs a pod's containers in a microVM, by runc. It is the guest's half of internal/podvm.
package podguest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/keylock"
	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Where a guest has what its containers are given. The host writes these paths into the containers' config.json.
const (
	// Shared shows the host's directory of the pod, by virtiofs.
	Shared = "/run/crust/shared"
	// Common is the directory therein of what several containers may have. No container has such a name.
	Common = "~common"
	// Memory is the pod's /dev/shm.
	Memory = "/run/crust/shm"
	// Tag is the name of the virtiofs device.
	Tag = "crust"
)

// CgroupsPath is the cgroup of the pod's containers in the guest, below which each has its own.
const CgroupsPath = "/crust"

const (
	cgroups = "/sys/fs/cgroup" + CgroupsPath
	runc    = "/bin/runc"
	busybox = "/bin/busybox"
	state   = "/run/runc"
	dir     = "/run/crust/containers"
)

// Server runs containers. Nothing else in its process may start programs, because it reaps the orphans of its containers.
type Server struct {
	guestv1.UnimplementedPodServer

	locks  keylock.Locks[string] // by container, while runc works for it
	ending context.Context       // ends when the pod does
	end    context.CancelFunc

	mu         sync.Mutex // never held while runc works
	begun      bool
	containers map[string]*process
	prepared   map[string]*process // by token
	running    map[string]*process // see key
	places     []place             // where containers listened lately

	kept *kept // guarded by locks, as the container keeper
}

// New returns a server, and makes this process the parent of what containers leave behind.
func New() (*Server, error) {
	s := &Server{containers: map[string]*process{}, prepared: map[string]*process{}, running: map[string]*process{}}
	s.ending, s.end = context.WithCancel(context.Background())
	return s, linux.AdoptOrphans()
}

// Begin sets up what all containers share: files, memory, cgroups, name and network.
func (s *Server) Begin(ctx context.Context, r *guestv1.BeginRequest) (*guestv1.BeginResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begun {
		return &guestv1.BeginResponse{}, nil
	}
	for _, m := range [][3]string{
		{Tag, Shared, "virtiofs"}, {"shm", Memory, "tmpfs"}, {"cgroup2", "/sys/fs/cgroup", "cgroup2"}, {"devpts", "/dev/pts", "devpts"},
	} {
		if err := os.MkdirAll(m[1], 0o755); err != nil {
			return nil, err
		}
		if err := linux.Mount(m[0], m[1], m[2], false, ""); err != nil && !errors.Is(err, linux.EBUSY) {
			return nil, fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	if err := os.Chmod(Memory, 0o777|os.ModeSticky); err != nil {
		return nil, err
	}
	if r.GetHostname() != "" {
		if err := linux.SetSysctl("kernel.hostname", r.GetHostname()); err != nil {
			return nil, err
		}
	}
	if err := connect(ctx, r.GetNetwork()); err != nil {
		return nil, err
	}
	if r.GetNetwork() != nil {
		if err := completeResets(); err != nil { // a kernel without nf_tables, for example
			fmt.Println("crust-guest: connections that are refused hang:", err) // the console
		}
	}
	for name, value := range r.GetSysctls() {
		if err := linux.SetSysctl(name, value); err != nil {
			return nil, err
		}
	}
	s.begun = true
	return &guestv1.BeginResponse{}, nil
}

var idPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// CreateContainer has runc make a container whose first process waits.
func (s *Server) CreateContainer(ctx context.Context, r *guestv1.CreateContainerRequest) (*guestv1.CreateContainerResponse, error) {
	id := r.GetContainerId()
	if !idPattern.MatchString(id) {
		return nil, fault.New(fault.Invalid, "container %q", id)
	}
	defer s.locks.Lock(id)()
	if err := s.mayCreate(id); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ending, cancel)() // the end of the pod does not wait for what this waits for
	at := filepath.Join(dir, id)
	if err := os.MkdirAll(at, 0o700); err != nil {
		return nil, err
	}
	processes, err := s.processNamespace(ctx, r)
	if err != nil {
		return nil, errors.Join(err, remove(ctx, id))
	}
	config, err := fit(ctx, id, at, processes, r)
	if err != nil {
		return nil, errors.Join(err, remove(ctx, id))
	}
	p, err := makeKnown(id, at, config)
	if err == nil {
		p.joined = processes != ""
		if err = p.make(ctx, "create", "--bundle", at); err == nil {
			if err = s.keep(id, p); err == nil {
				return &guestv1.CreateContainerResponse{}, nil
			}
		}
		p.close()
	}
	return nil, errors.Join(err, remove(ctx, id))
}

func (s *Server) mayCreate(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.begun:
		return fault.New(fault.State, "the pod has not begun, or ends")
	case s.containers[id] != nil:
		return fault.New(fault.Exists, "container %s is there already", id)
	}
	return nil
}

// keep notes a container, unless the pod has ended meanwhile.
func (s *Server) keep(id string, p *process) error {
	if err := s.mayCreate(id); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.containers[id] = p
	return nil
}

// PrepareProcess notes a process for Run.
func (s *Server) PrepareProcess(_ context.Context, r *guestv1.PrepareProcessRequest) (*guestv1.PrepareProcessResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[r.GetContainerId()]
	if c == nil {
		return nil, fault.New(fault.NotFound, "there is no container %s", r.GetContainerId())
	}
	s.dropUnused()
	token := rand.Text()
	at := filepath.Join(c.dir, token)
	if err := os.MkdirAll(at, 0o700); err != nil {
		return nil, err
	}
	p, err := newExec(c.container, at, r.GetProcess())
	if err != nil {
		return nil, errors.Join(err, removeFiles(at))
	}
	p.dir, p.prepared, s.prepared[token] = at, time.Now(), p
	return &guestv1.PrepareProcessResponse{Token: token}, nil
}

// unused is how long a prepared process waits for its Run. The host gives up sooner.
const unused = 10 * time.Minute

// dropUnused removes prepared processes that nobody ran: whoever wanted them was interrupted. The caller has the lock.
func (s *Server) dropUnused() {
	for token, p := range s.prepared {
		if time.Since(p.prepared) > unused {
			p.close()
			delete(s.prepared, token)
			if err := removeFiles(p.dir); err != nil {
				fmt.Println("crust-guest: what is left of a process that nobody ran:", err) // the console
			}
		}
	}
}

// DeleteContainer removes a container and lets go of the files that the host shared for it.
func (s *Server) DeleteContainer(ctx context.Context, r *guestv1.DeleteContainerRequest) (*guestv1.DeleteContainerResponse, error) {
	id := r.GetContainerId()
	if !idPattern.MatchString(id) {
		return nil, fault.New(fault.Invalid, "container %q", id)
	}
	return &guestv1.DeleteContainerResponse{}, s.delete(ctx, id)
}

func (s *Server) delete(ctx context.Context, id string) error {
	defer s.locks.Lock(id)()
	s.mu.Lock()
	if p := s.containers[id]; p != nil {
		p.close()
		delete(s.containers, id)
	}
	for token, p := range s.prepared {
		if p.container == id {
			p.close()
			delete(s.prepared, token)
		}
	}
	s.mu.Unlock()
	return remove(ctx, id)
}

// End kills all containers. New ones are refused from now on. What was written is on the volumes first and last: a container that does not
// end, because it waits for a file of the host's, must not cost the others their data.
func (s *Server) End(ctx context.Context, _ *guestv1.EndRequest) (*guestv1.EndResponse, error) {
	s.mu.Lock()
	s.begun = false
	s.mu.Unlock()
	s.end()
	err := syncVolumes()
	containers, derr := os.ReadDir(dir)
	if derr != nil && !errors.Is(derr, os.ErrNotExist) {
		return nil, errors.Join(err, derr)
	}
	var all sync.WaitGroup
	errs := make([]error, len(containers))
	for i, c := range containers { // those that are being made, too
		all.Go(func() { errs[i] = s.delete(ctx, c.Name()) })
	}
	all.Wait()
	return &guestv1.EndResponse{}, errors.Join(err, errors.Join(errs...), syncVolumes())
}

// syncVolumes writes out the file systems on devices, and raw block volumes, all at once: one that hangs costs the others nothing. File
// systems of the host might never answer.
func syncVolumes() error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	raw, err := rawDisks()
	var tasks []func() error
	for _, point := range onDevices(string(mounts)) {
		tasks = append(tasks, func() error {
			f, err := linux.Open(point, os.O_RDONLY|linux.ONofollow)
			if err == nil {
				err = linux.Syncfs(f)
				f.Close()
			}
			if err != nil && !errors.Is(err, os.ErrNotExist) { // it may have been unmounted
				return fmt.Errorf("sync %s: %w", point, err)
			}
			return nil
		})
	}
	for _, name := range raw {
		tasks = append(tasks, func() error { return syncRaw(name) })
	}
	var all sync.WaitGroup
	errs := make([]error, len(tasks))
	for i, task := range tasks {
		all.Go(func() { errs[i] = task() })
	}
	all.Wait()
	return errors.Join(append(errs, err)...)
}

// onDevices returns where file systems on devices are mounted, from the text of mountinfo, proc(5).
func onDevices(mounts string) (points []string) {
	const mountPoint = 4
	for line := range strings.Lines(mounts) {
		own, rest, _ := strings.Cut(line, " - ")
		f, of := strings.Fields(own), strings.Fields(rest) // type, source, options
		if len(f) > mountPoint && len(of) > 1 && strings.HasPrefix(of[1], "/dev/") {
			points = append(points, unescape.Replace(f[mountPoint]))
		}
	}
	return points
}

// unescape undoes what the kernel does to the characters that separate fields.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// removalTime limits the removal of a container whose caller may have gone: nobody would repeat it.
const removalTime = 30 * time.Second

func remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removalTime)
	defer cancel()
	at := filepath.Join(dir, id)
	if _, err := os.Stat(at); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	out, err := exec.CommandContext(ctx, runc, "--root", state, "delete", "--force", id).CombinedOutput()
	if err != nil {
		return errors.Join(fmt.Errorf("runc delete: %w: %s", err, out), dropOverlay(id), forget(id))
	}
	names, err := os.ReadDir(at)
	err = errors.Join(err, dropOverlay(id))
	for _, n := range names {
		if n.IsDir() { // a process's
			err = errors.Join(err, removeFiles(filepath.Join(at, n.Name())))
		}
	}
	return errors.Join(err, removeFiles(at), forget(id))
}

// removeFiles removes a directory of files. Another call may do the same at the same time.
func removeFiles(dir string) error {
	names, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, path := range append(names, nil) {
		at := dir
		if path != nil {
			at = filepath.Join(dir, path.Name())
		}
		if err := os.Remove(at); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// isGone tells of an error of linux.Unmount whether nothing is mounted there.
func isGone(err error) bool { return errors.Is(err, linux.EINVAL) || errors.Is(err, os.ErrNotExist) }
