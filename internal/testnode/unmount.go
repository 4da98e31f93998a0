package testnode

import (
	"errors"
	"syscall"
	"testing"
	"time"
)

// Unmount takes the mount at dir away, as umount(8) does, and waits for whoever
// has it in use only for a moment. Tests run beside each other, and a child that
// one of them starts has copies of all descriptors until its execve(2): on a busy
// machine that may be a second.
func Unmount(t testing.TB, dir string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Unmount(dir, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(end) {
			t.Fatalf("unmount %s: %v", dir, err)
		}
	}
}
