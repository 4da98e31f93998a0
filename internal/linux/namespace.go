package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Peer is the process at the other end of a unix socket.
type Peer struct {
	PID int
	UID uint32
}

// PeerOf is getsockopt(2) SO_PEERCRED, unix(7).
func PeerOf(c syscall.RawConn) (Peer, error) {
	var cred *unix.Ucred
	var err error
	cerr := c.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(cerr, err); err != nil {
		return Peer{}, os.NewSyscallError("getsockopt", err)
	}
	return Peer{PID: int(cred.Pid), UID: cred.Uid}, nil
}

// ListenPrivate makes a unix socket that is never reachable with wider permissions than mode:
// bind(2) gives a socket's file the mode of its descriptor, less the umask.
func ListenPrivate(path string, mode os.FileMode) (net.Listener, error) {
	c := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		var err error
		cerr := socket.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), uint32(mode.Perm())) })
		return errors.Join(cerr, os.NewSyscallError("fchmod", err))
	}}
	l, err := c.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, mode); err != nil { // restore the bits that the umask removed
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// InMountNamespace runs f on a thread in that mount namespace, with "/" as its root and working
// directory. f must not use other goroutines for work that depends on the namespace. The thread
// ends with it.
func InMountNamespace(ns *os.File, f func() error) error {
	result := make(chan error, 1)
	onOwnThread(func() {
		if err := EnterMountNamespace(ns); err != nil {
			result <- err
			return
		}
		defer func() {
			if p := recover(); p != nil {
				result <- fmt.Errorf("panic: %v", p)
			}
		}()
		result <- f()
	})
	return <-result
}

// onOwnThread runs f, in the background, on a thread that ends with it, so that f may leave it in
// any state. It never uses the process's first thread: that thread does not end, and its namespaces
// are what /proc/PID/ns shows for the process, which others enter (a container runtime, for an
// exec).
func onOwnThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f() // never unlocked: the thread ends with this goroutine
			return
		}
		// While this goroutine holds the first thread, the next one gets another.
		elsewhere := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(elsewhere)
			f()
		}()
		<-elsewhere
		runtime.UnlockOSThread()
	}()
}

// PinMountNamespace makes a mount namespace that is a slave of this one (mounts made here appear
// there, but not vice versa) and binds it to the file pin, which keeps it alive. pin must be on a
// private mount.
//
// The kernel refuses (EINVAL) to bind a namespace into a younger one, by their numbers, which it
// allocates in batches per processor (seen on Linux 6.18). If this process is not in the machine's
// first namespace, a new one may therefore seem older; one made on another processor does not.
func PinMountNamespace(pin string) error {
	err := pinMountNamespace(pin, -1)
	for cpu := 0; errors.Is(err, EINVAL) && cpu < runtime.NumCPU(); cpu++ {
		err = pinMountNamespace(pin, cpu)
	}
	return err
}

func pinMountNamespace(pin string, cpu int) error {
	made := make(chan int, 1)
	failed := make(chan error, 1)
	pinned := make(chan struct{})
	onOwnThread(func() {
		if cpu >= 0 {
			var set unix.CPUSet
			set.Set(cpu)
			// If it may not run there, it stays where it is.
			_ = unix.SchedSetaffinity(0, &set)
		}
		err := call("unshare", func() error { return unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS) })
		if err == nil {
			err = call("mount", func() error { return unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, "") })
		}
		if err != nil {
			failed <- err
			return
		}
		made <- unix.Gettid()
		<-pinned
	})
	defer close(pinned)
	select {
	case err := <-failed:
		return err
	case tid := <-made:
		return BindFile("/proc/self/task/"+strconv.Itoa(tid)+"/ns/mnt", pin)
	}
}

// BindFile is mount(2) with MS_BIND: a namespace, given by a path in /proc, lasts while it is bound
// to a file.
func BindFile(source, target string) error {
	return call("mount", func() error { return unix.Mount(source, target, "", unix.MS_BIND, "") })
}

// PrivateMount makes a directory a mount of its own, unless it already is one, that propagates
// nothing. A process may have been killed between the two.
func PrivateMount(dir string) error {
	st, err := StatxPath(dir)
	if err != nil {
		return err
	}
	if !st.MountRoot {
		if err := call("mount", func() error { return unix.Mount(dir, dir, "", unix.MS_BIND, "") }); err != nil {
			return err
		}
	}
	return call("mount", func() error { return unix.Mount("", dir, "", unix.MS_PRIVATE, "") })
}

// Unmount is umount2(2) with MNT_DETACH and UMOUNT_NOFOLLOW; EINVAL if nothing is mounted.
func Unmount(path string) error {
	return call("umount2", func() error { return unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) })
}

// EnterMountNamespace moves this thread, which the caller has locked, into the namespace
// permanently; for callers that exec afterwards.
func EnterMountNamespace(ns *os.File) error {
	if err := call("unshare", func() error { return unix.Unshare(unix.CLONE_FS) }); err != nil {
		return err
	}
	return call("setns", func() error { return unix.Setns(fdOf(ns), unix.CLONE_NEWNS) })
}

// InNetwork runs f in a network namespace; nil is this process's.
func InNetwork(ns *os.File, f func() error) error {
	if ns == nil {
		return f()
	}
	return OnOwnThread(func() error {
		if err := call("setns", func() error { return unix.Setns(fdOf(ns), unix.CLONE_NEWNET) }); err != nil {
			return err
		}
		return f()
	})
}

// Exec is execve(2).
func Exec(path string, argv, env []string) error {
	return call("execve", func() error { return unix.Exec(path, argv, env) })
}

// MakeUnbindable is mount_setattr(2): the mount that f is on refuses to be bound elsewhere
// (EINVAL), in this mount namespace; other namespaces are not affected.
func MakeUnbindable(f *os.File) error {
	attr := unix.MountAttr{Propagation: unix.MS_UNBINDABLE}
	return call("mount_setattr", func() error { return unix.MountSetattr(fdOf(f), "", unix.AT_EMPTY_PATH, &attr) })
}

// FileOf is pidfd_getfd(2): a descriptor of another process, for the same open file.
func FileOf(pid, fd int) (*os.File, error) {
	process, err := ProcessEnd(pid)
	if err != nil {
		return nil, err
	}
	defer process.Close()
	return open("pidfd_getfd", fmt.Sprintf("descriptor %d of process %d", fd, pid), func() (int, error) {
		return unix.PidfdGetfd(fdOf(process), fd, 0)
	})
}

// ReadOnly tells whether a file was opened for reading only: fcntl(2) with F_GETFL.
func ReadOnly(f *os.File) (bool, error) {
	var flags int
	err := call("fcntl", func() (e error) { flags, e = unix.FcntlInt(uintptr(fdOf(f)), unix.F_GETFL, 0); return e })
	return flags&unix.O_ACCMODE == unix.O_RDONLY, err
}

// ProcessEnd is pidfd_open(2): the descriptor becomes readable when the process ends.
func ProcessEnd(pid int) (*os.File, error) {
	return open("pidfd_open", "process "+strconv.Itoa(pid), func() (int, error) { return unix.PidfdOpen(pid, 0) })
}

// WaitEnd waits until the process of a descriptor from ProcessEnd has ended; false if ctx ended
// first.
func WaitEnd(ctx context.Context, pidfd *os.File) bool {
	for ctx.Err() == nil {
		p := []unix.PollFd{{Fd: int32(fdOf(pidfd)), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 200)
		if err == nil && n > 0 {
			return true
		}
		if Short(err) {
			time.Sleep(200 * time.Millisecond)
			continue
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false
		}
	}
	return false
}

// SendFile sends bytes and a descriptor over a unix socket, SCM_RIGHTS of unix(7).
func SendFile(c *net.UnixConn, b []byte, f *os.File) error {
	_, _, err := c.WriteMsgUnix(b, unix.UnixRights(fdOf(f)), nil)
	return err
}

// PollFile waits for f to be readable; hangup means that the other end is closed.
func PollFile(f *os.File, timeout time.Duration) (readable, hangup bool, err error) {
	p := []unix.PollFd{{Fd: int32(fdOf(f)), Events: unix.POLLIN}}
	err = call("poll", func() error { _, e := unix.Poll(p, int(timeout.Milliseconds())); return e })
	return p[0].Revents&unix.POLLIN != 0, p[0].Revents&unix.POLLHUP != 0, err
}

// NewSession starts a program that outlives this process's terminal, setsid(2).
func NewSession() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// PowerOff is reboot(2): the machine stops at once, without writing open files.
func PowerOff() error {
	return call("reboot", func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) })
}

// Reap waits for all children, wait4(2), until one of the given ones ends, and returns that: the work of PID 1.
func Reap(until ...int) (int, error) {
	for {
		var pid int
		err := call("wait4", func() (e error) { pid, e = unix.Wait4(-1, nil, 0, nil); return e })
		if err != nil || slices.Contains(until, pid) {
			return pid, err
		}
	}
}

// ProcessStart returns a process's start time, in clock ticks since boot (field 22 of
// /proc/PID/stat, proc(5)). Together with the pid it identifies a process. ENOENT or ESRCH: there
// is none.
func ProcessStart(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The second field, in parentheses, may hold anything.
	rest := string(b[bytes.LastIndexByte(b, ')')+1:])
	const field = 22 - 3
	f := strings.Fields(rest)
	if len(f) <= field {
		return "", fmt.Errorf("/proc/%d/stat has %d fields", pid, len(f))
	}
	return f[field], nil
}

// PIDNamespace names the pid namespace of this process.
func PIDNamespace() (string, error) { return os.Readlink("/proc/self/ns/pid") }
