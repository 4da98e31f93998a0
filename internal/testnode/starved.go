package testnode

import (
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// WithoutDescriptors runs f on a thread that can open directories and no files: the kernel answers
// EMFILE, as if the process had run out of descriptors just then. f must not start goroutines that
// open files.
func WithoutDescriptors(t testing.TB, f func()) {
	t.Helper()
	failed := make(chan error)
	go func() {
		// Without an unlock, the thread and its filter end with this goroutine.
		runtime.LockOSThread()
		err := refuseFiles()
		if err == nil {
			f()
		}
		failed <- err
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

// refuseFiles installs a seccomp filter for this thread.
func refuseFiles() error {
	const nr, flags = 0, 16 + 2*8 // offsets in struct seccomp_data: the call, the lower half of its third argument
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nr},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_OPENAT, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: flags},
		{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: unix.O_DIRECTORY, Jt: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EMFILE)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
	runtime.KeepAlive(filter)
	return err
}
