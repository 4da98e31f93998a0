package linux

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// NewUserns makes a user namespace with these maps, in the format of /proc/PID/uid_map, and returns
// a descriptor of it, for idmapped mounts. It runs no program: it makes a copy of this process that
// only waits until it is killed. The copy shares the descriptor table, so it keeps no mount in use.
func NewUserns(uidMap, gidMap string) (*os.File, error) {
	// The child is a child of this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, errno := cloneAndPause()
	if errno != 0 {
		return nil, os.NewSyscallError("clone", errno)
	}
	ns, err := mapUserns(pid, uidMap, gidMap)
	kerr := call("kill", func() error { return unix.Kill(pid, unix.SIGKILL) })
	werr := call("wait4", func() error { _, e := unix.Wait4(pid, nil, 0, nil); return e })
	if err := errors.Join(err, kerr, werr); err != nil {
		if ns != nil {
			ns.Close()
		}
		return nil, err
	}
	return ns, nil
}

func mapUserns(pid int, uidMap, gidMap string) (*os.File, error) {
	for name, content := range map[string]string{"uid_map": uidMap, "gid_map": gidMap} {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", pid, name), []byte(content), 0); err != nil {
			return nil, fmt.Errorf("%w (the map was %q)", err, content)
		}
	}
	return Open(fmt.Sprintf("/proc/%d/ns/user", pid), unix.O_RDONLY)
}

// cloneAndPause returns the pid of a child in a new user namespace. The child has one thread and
// none of Go's runtime: it must make only raw system calls.
//
//go:noinline
//go:norace
func cloneAndPause() (int, unix.Errno) {
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_NEWUSER|unix.CLONE_FILES|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return int(pid), errno
	}
	_, _, _ = unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0, 0)
	for {
		_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
	}
}
