package linux

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OnOwnThread runs f on a thread that ends with it, so that f may leave it in any state, and waits
// for it. Children that f starts inherit the thread's state.
func OnOwnThread(f func() error) error {
	result := make(chan error, 1)
	onOwnThread(func() {
		defer func() {
			if p := recover(); p != nil {
				result <- fmt.Errorf("panic: %v", p)
			}
		}()
		result <- f()
	})
	return <-result
}

// Namespaces are the namespaces of a program. They last while the descriptors are open.
type Namespaces []*os.File

// NewNamespaces makes a mount namespace with the result of build, and empty network, IPC and UTS
// namespaces. build runs in a copy of this mount namespace that propagates nothing.
func NewNamespaces(build func() error) (ns Namespaces, err error) {
	err = OnOwnThread(func() error {
		const flags = unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
		if err := call("unshare", func() error { return unix.Unshare(flags) }); err != nil {
			return err
		}
		if err := call("mount", func() error { return unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, "") }); err != nil {
			return err
		}
		// build may remove /proc.
		dir, err := Open("/proc/self/task/"+strconv.Itoa(unix.Gettid())+"/ns", unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer dir.Close()
		if err := build(); err != nil {
			return err
		}
		for _, name := range []string{"mnt", "net", "ipc", "uts"} {
			f, err := Openat(dir, name, unix.O_RDONLY, 0)
			if err != nil {
				ns.Close()
				ns = nil
				return err
			}
			ns = append(ns, f)
		}
		return nil
	})
	return ns, err
}

// Close releases the descriptors.
func (n Namespaces) Close() {
	for _, f := range n {
		f.Close()
	}
}

// Enter moves this thread, which the caller owns, into a copy of the mount namespace and into the
// others, and its children into a new PID namespace.
func (n Namespaces) Enter() error {
	if err := call("unshare", func() error { return unix.Unshare(unix.CLONE_FS) }); err != nil {
		return err
	}
	for _, f := range n {
		if err := call("setns", func() error { return unix.Setns(fdOf(f), 0) }); err != nil {
			return err
		}
	}
	return call("unshare", func() error { return unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWPID) })
}

// PivotRoot makes a mounted directory the root of this mount namespace, and detaches the old one
// with everything mounted below.
func PivotRoot(root *os.File) error {
	if err := call("fchdir", func() error { return unix.Fchdir(fdOf(root)) }); err != nil {
		return err
	}
	// pivot_root(2): with the same directory twice, the old root lies on the new one.
	if err := call("pivot_root", func() error { return unix.PivotRoot(".", ".") }); err != nil {
		return err
	}
	if err := call("umount2", func() error { return unix.Unmount(".", unix.MNT_DETACH) }); err != nil {
		return err
	}
	return call("chdir", func() error { return unix.Chdir("/") })
}

// DropCapabilities drops all capabilities of this thread, permanently after NoNewPrivileges.
func DropCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return call("capset", func() error { return unix.Capset(&header, &data[0]) })
}

// NoNewPrivileges sets no_new_privs for this thread: see prctl(2).
func NoNewPrivileges() error {
	return call("prctl", func() error { return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
}

// Refuse makes the kernel refuse the system calls in refused, and those newer than the list, for
// this thread and its children. See seccomp(2).
func Refuse() error {
	filter := refusal()
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := call("seccomp", func() error {
		_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program)))
		return errnoErr(errno)
	})
	runtime.KeepAlive(filter)
	return err
}

// A program that works on a file system needs none of the system calls in refused: they mount,
// enter namespaces, load code into the kernel, inspect other processes, make devices, set clocks,
// or reach a network.
var refused = append([]uintptr{
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT,
	unix.SYS_FSPICK, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE, unix.SYS_MOUNT_SETATTR, unix.SYS_SETNS, unix.SYS_UNSHARE,
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PIDFD_GETFD, unix.SYS_KCMP,
	unix.SYS_KEXEC_LOAD, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN,
	unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER, unix.SYS_FANOTIFY_INIT,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL, unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_ACCT,
	unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD, unix.SYS_SYSLOG, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_CLOCK_ADJTIME,
	unix.SYS_ADJTIMEX,
	unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME, unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_MKNODAT, unix.SYS_SOCKET, unix.SYS_SOCKETPAIR,
}, refusedHere...)

// refusal is the filter in classic BPF. The offsets are those of struct seccomp_data.
func refusal() []unix.SockFilter {
	const (
		load    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		atLeast = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		anyBit  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		give    = unix.BPF_RET | unix.BPF_K

		number, arch, firstArg, secondArg = 0, 4, 16, 24
		allow                             = unix.SECCOMP_RET_ALLOW
		eperm                             = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		enosys                            = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
		unknown                           = unix.SYS_OPEN_TREE_ATTR // this call, all later ones, and amd64's x32
		namespaces                        = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
			unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
		loopIoctls = 0x4c // LOOP_*: they change what is behind the device
		// xfs programs set the block size of the page cache, which needs CAP_SYS_ADMIN, and exit if
		// that fails. They do direct I/O and need neither.
		setBlockSize, flushCache = unix.BLKBSZSET, unix.BLKFLSBUF
		pretend                  = unix.SECCOMP_RET_ERRNO // 0: success
	)
	f := []unix.SockFilter{
		{Code: load, K: arch}, {Code: equal, Jt: 1, K: auditArch}, {Code: give, K: eperm},
		{Code: load, K: number}, {Code: atLeast, Jf: 1, K: unknown}, {Code: give, K: enosys},
		// Without clone3, whose flags cannot be inspected here, glibc creates threads with clone.
		{Code: equal, Jf: 1, K: unix.SYS_CLONE3}, {Code: give, K: enosys},
		{Code: equal, Jf: 3, K: unix.SYS_CLONE},
		{Code: load, K: firstArg}, {Code: anyBit, Jt: 0, Jf: 1, K: namespaces}, {Code: give, K: eperm},
		{Code: load, K: number}, {Code: equal, Jf: 8, K: unix.SYS_IOCTL},
		{Code: load, K: secondArg},
		{Code: equal, Jt: 1, K: setBlockSize}, {Code: equal, Jf: 1, K: flushCache}, {Code: give, K: pretend},
		{Code: unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K, K: 8}, {Code: equal, Jf: 1, K: loopIoctls}, {Code: give, K: eperm},
		{Code: load, K: number},
	}
	for _, n := range slices.Compact(slices.Sorted(slices.Values(refused))) {
		f = append(f, unix.SockFilter{Code: equal, Jf: 1, K: uint32(n)}, unix.SockFilter{Code: give, K: eperm})
	}
	return append(f, unix.SockFilter{Code: give, K: allow})
}

// LimitMemory limits the address space of a child, in bytes, and makes it the first victim of the
// OOM killer. A child that has ended is no error.
func LimitMemory(pid int, bytes uint64) error {
	limit := unix.Rlimit{Cur: bytes, Max: bytes}
	if err := call("prlimit", func() error { return unix.Prlimit(pid, unix.RLIMIT_AS, &limit, nil) }); err != nil {
		return err
	}
	err := os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("1000"), 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil // not waited for yet, and without memory
	}
	return err
}
