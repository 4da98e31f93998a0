package podvm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/podguest"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// ownProgram is this program's file.
func ownProgram() (string, error) { return os.Executable() }

// errEnded is in the error chain of a call to the guest of a pod that has ended, or whose monitor is about to.
var errEnded = errors.New("has ended")

func (p *Pod) client() (guestv1.PodClient, *grpc.ClientConn, error) {
	// A monitor that ends removes its socket first.
	if _, err := os.Lstat(p.at(podSocket)); errors.Is(err, os.ErrNotExist) || !p.Monitor.runs() {
		p.Pause.kill() // the kubelet makes the pod anew then
		return nil, nil, fmt.Errorf("the microVM of pod %s %w", p.ID, errEnded)
	}
	conn, err := dial("unix://" + p.at(podSocket))
	if err != nil {
		return nil, nil, err
	}
	return guestv1.NewPodClient(conn), conn, nil
}

// CreateContainer makes a container in a pod's guest, and its stub on the host. file is the container's config.json.
func (r *Runtime) CreateContainer(ctx context.Context, config map[string]any, file, pod string, c Call) (err error) {
	if err := refused(config, false); err != nil {
		return err
	}
	if !idPattern.MatchString(c.ID) {
		return fmt.Errorf("container %q: an id has letters, digits, dots, dashes and underscores", c.ID)
	}
	devices, err := blockDevices(config)
	if err != nil {
		return err
	}
	p, err := r.Pods.find(pod)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("pod %s has no microVM: was its sandbox made by this runtime?", pod)
	}
	if err != nil {
		return err
	}
	own, err := usersOf(config)
	if err != nil {
		return err
	}
	if own != nil && (p.Users == nil || *own != *p.Users) {
		return fmt.Errorf("container %s has other users than its pod", c.ID)
	}
	request := &guestv1.CreateContainerRequest{ContainerId: c.ID, BlockDevices: devices}
	if request.SharesProcesses, request.ProcessesOf, err = p.processesOf(namespaces(config)["pid"]); err != nil {
		return err
	}
	guest, conn, err := p.client()
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	if err := p.add(c.ID); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.drop(c.ID))
		}
	}()
	root := text(sub(config, "root"), "path")
	if !filepath.IsAbs(root) {
		root = filepath.Join(filepath.Dir(file), root)
	}
	if err := p.share(c.ID, "rootfs", root, access{readOnly: sub(config, "root")["readonly"] == true}); err != nil {
		return err
	}
	request.Config, err = forGuest(config, c.ID, func(mount object) (string, error) {
		return r.place(ctx, p, config, c.ID, filepath.Dir(file), mount)
	})
	if err != nil {
		return err
	}
	defer func() { // a call that the guest did not finish may have made a part of it
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTime)
			defer cancel()
			_, derr := guest.DeleteContainer(ctx, &guestv1.DeleteContainerRequest{ContainerId: c.ID})
			err = errors.Join(err, p.said(derr, deleteTime))
		}
	}()
	if _, err = guest.CreateContainer(ctx, request); err != nil {
		return p.said(err, bootTime)
	}
	here, err := p.forStub(config, c.ID)
	if err != nil {
		return err
	}
	if err := replace(file, here); err != nil {
		return err
	}
	if err := r.host(c.Args...); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.host(append(c.globals(), "delete", "--force", c.ID)...))
		}
	}()
	stub, err := r.process(c)
	if err != nil {
		return err
	}
	return errors.Join(p.noteStub(c.ID, stub), p.spare(sub(config, "process")))
}

// place returns the guest's path of a mount's source: in a volume that the guest mounted, the pod's /dev/shm, or what the host shares.
func (r *Runtime) place(ctx context.Context, p *Pod, config object, container, bundle string, mount object) (string, error) {
	source := text(mount, "source")
	if !filepath.IsAbs(source) {
		source = filepath.Join(bundle, source)
	}
	path, err := r.Resolve(ctx, p.ID, source)
	away := status.Code(err) == codes.Unavailable // as while it is being restarted
	if slot, serr := Slot(config, mount, source, path); slot {
		return path, cmp.Or(err, serr)
	}
	if err != nil && !away || path != "" {
		return path, err
	}
	deferred, perr := mounter.IsPlaceholder(source)
	switch {
	case perr != nil:
		return "", perr
	case deferred && away:
		return "", err
	case deferred:
		return "", NotPublished(source, p.ID)
	case text(mount, "destination") == "/dev/shm" && isMemoryOf(p.ID, source):
		return podguest.Memory, nil
	}
	a, err := accessOf(mount)
	if err != nil {
		return "", err
	}
	at, err := p.shareCommon(container, source, a)
	return filepath.Join(podguest.Shared, at), err
}

// NotPublished is the error of a mount whose source is of a deferred volume that the sandbox does not have.
func NotPublished(source, sandbox string) error {
	if strings.Contains(source, "/volume-subpaths/") { // what a kubelet binds of a placeholder
		return fmt.Errorf("%s is a subPath of a deferred volume, and crust-agent has not replaced it: check that it runs and is connected "+
			"to NRI", source)
	}
	return fmt.Errorf("%s is of a volume that was deferred, and was not published to sandbox %s", source, sandbox)
}

// isMemoryOf tells whether a path is where the container runtime keeps a pod's /dev/shm. A volume may be mounted there, too.
func isMemoryOf(pod, source string) bool {
	return filepath.Base(source) == "shm" && slices.Contains(strings.Split(source, "/"), pod)
}

func replace(file string, b []byte) error {
	st, err := os.Stat(file)
	if err != nil {
		return err
	}
	next := file + ".crust"
	if err := os.WriteFile(next, b, st.Mode().Perm()); err != nil {
		return err
	}
	return os.Rename(next, file)
}

// start starts a container's stub, and waits until signals reach its process.
func (r *Runtime) start(ctx context.Context, p *Pod, c Call) error {
	stub, err := r.process(c)
	if err != nil {
		return err
	}
	if err := r.host(c.Args...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	for {
		if _, err := os.Stat(filepath.Join(p.at("started"), c.ID)); err == nil {
			return nil
		}
		if !stub.runs() {
			return nil // it has ended, and its caller sees how
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("container %s does not start: the guest of pod %s does not answer", c.ID, p.ID)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// tokenPattern is that of what a guest calls a prepared process: crypto/rand.Text.
var tokenPattern = regexp.MustCompile(`^[A-Z2-7]{26,64}$`)

// mostTurns is how many calls of a pod's exec there may be at a time. Each is a process outside the pod's cgroup: a guest that does not
// answer, whose probes go on, would fill the node's memory with them.
const mostTurns = 32

// turn returns a file whose lock this process holds until it closes the file or ends.
func (p *Pod) turn() (*os.File, error) {
	for i := range mostTurns {
		f, err := os.OpenFile(p.at(fmt.Sprintf("exec-%d", i)), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err = linux.Flock(f); err == nil {
			return f, nil
		}
		f.Close()
		if !errors.Is(err, linux.EAGAIN) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("the microVM of pod %s: %d commands wait for the guest already: the machine is busy, or the guest hangs; "+
		"the guest's console is %s", p.ID, mostTurns, p.at(consoleLog))
}

// exec prepares a process in the guest, and has the host's runtime start a stub for it beside the container's own.
func (r *Runtime) exec(ctx context.Context, p *Pod, c Call) error {
	if c.Process == "" {
		return errors.New("exec in a microVM wants --process, a file that describes the process")
	}
	var process object
	if err := readJSON(c.Process, &process); err != nil {
		return err
	}
	guest, conn, err := p.client() // or the pod has ended
	if err != nil {
		return err
	}
	defer conn.Close()
	turn, err := p.turn()
	if err != nil {
		return err
	}
	defer turn.Close()
	there, err := json.Marshal(processForGuest(process))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	prepared, err := guest.PrepareProcess(ctx, &guestv1.PrepareProcessRequest{ContainerId: c.ID, Process: there})
	if err != nil {
		return p.said(err, bootTime)
	}
	if !tokenPattern.MatchString(prepared.GetToken()) {
		return fmt.Errorf("the microVM of pod %s: the guest has an answer that makes no sense", p.ID)
	}
	f, err := os.CreateTemp(p.dir, "process-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // or it goes with the pod
	err = json.NewEncoder(f).Encode(stubProcess(process, "CRUST_TOKEN="+prepared.GetToken()))
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	args := slices.Clone(c.Args)
	for i, a := range args {
		switch a {
		case c.Process:
			args[i] = f.Name()
		case "--process=" + c.Process:
			args[i] = "--process=" + f.Name()
		}
	}
	return r.host(args...)
}

// deleteContainer deletes what the host's runtime knows, and then all else. An earlier call may have been interrupted in between: its
// caller has a deadline.
func (r *Runtime) deleteContainer(ctx context.Context, p *Pod, c Call) error {
	herr := r.deleteHere(c)
	if herr != nil && !r.forgot(c) && !p.stubEnded(c.ID) {
		return herr
	}
	ctx, cancel := context.WithTimeout(ctx, deleteTime)
	defer cancel()
	if err := p.deleteInGuest(ctx, c.ID); err != nil && !errors.Is(err, errEnded) {
		// A guest that does not answer holds up nothing on the host: the container's stub has ended.
		p.say("delete:", err)
	}
	if err := p.drop(c.ID); err != nil || r.forgot(c) {
		return err
	}
	return herr
}

func (p *Pod) deleteInGuest(ctx context.Context, container string) error {
	guest, conn, err := p.client()
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = guest.DeleteContainer(ctx, &guestv1.DeleteContainerRequest{ContainerId: container})
	return p.said(err, deleteTime)
}

// said is the error of a call to the monitor or to the guest, whose text may be anything. The call was given this time.
func (p *Pod) said(err error, within time.Duration) error {
	if err == nil {
		return nil
	}
	text := plain.Text(status.Convert(err).Message(), plain.Most)
	switch status.Code(err) {
	case codes.DeadlineExceeded, codes.Canceled: // whose clock was first
		text = fmt.Sprintf("no answer within %s: the machine is busy, or the guest hangs (%s); the guest's console is %s", within, text,
			p.at(consoleLog))
	}
	return fmt.Errorf("the microVM of pod %s: %s", p.ID, text)
}
