package linux

import (
	"errors"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A recently opened mount can be unmounted while programs are constantly being started, whose
// copies of the descriptor only execve closes.
func TestA12_ChildrenThatAreBeingStartedAreWaitedFor(t *testing.T) {
	dir := t.TempDir()
	var stop atomic.Bool
	var starting sync.WaitGroup
	for range 4 {
		starting.Go(func() {
			for !stop.Load() {
				started := Starting()
				cmd := exec.Command("true")
				err := cmd.Start()
				started()
				if err != nil || cmd.Wait() != nil {
					t.Errorf("true: %v", err)
					return
				}
			}
		})
	}
	defer func() { stop.Store(true); starting.Wait() }()
	needed := 0
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end) && needed < 20; {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		f, err := Open(dir, OPath)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		tries := 0
		err = Settle(func() error {
			tries++
			return call("umount2", func() error { return unix.Unmount(dir, 0) })
		})
		if tries > 1 {
			needed++
		}
		if err != nil {
			_ = unix.Unmount(dir, unix.MNT_DETACH)
			t.Fatalf("after %d tries: %v", tries, err)
		}
	}
	t.Logf("%d unmounts met a child", needed)
}

func TestA12_NobodyIsWaitedForWhoWasNotStarted(t *testing.T) {
	starts.Lock()
	starts.last = time.Time{}
	starts.Unlock()
	tries := 0
	if err := Settle(func() error { tries++; return os.NewSyscallError("umount2", EBUSY) }); !errors.Is(err, EBUSY) || tries != 1 {
		t.Errorf("%d tries: %v", tries, err)
	}
}

// A program that another process starts has copies of that process's descriptors until execve.
func TestA12_AChildOfAnotherProcessIsWaitedFor(t *testing.T) {
	starts.Lock()
	starts.last = time.Time{}
	starts.Unlock()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }() // already off
	holder := exec.Command("sleep", "3600")
	holder.Dir = dir
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	tries := 0
	err := Outlast(func() error {
		if tries++; tries == 3 {
			_ = holder.Process.Kill()
			_ = holder.Wait() // "signal: killed"
		}
		return call("umount2", func() error { return unix.Unmount(dir, 0) })
	})
	if err != nil || tries < 3 {
		t.Errorf("%d tries: %v", tries, err)
	}
	if err := Outlast(func() error { return os.NewSyscallError("umount2", EBUSY) }); !errors.Is(err, EBUSY) {
		t.Errorf("a holder that stays: %v", err)
	}
}

// On a busy machine a try takes long, and so does the child that is to be outlasted.
func TestA12_OutlastIsAsPatientAsTheMachineIsBusy(t *testing.T) {
	tries := 0
	err := Outlast(func() error {
		time.Sleep(20 * time.Millisecond) // ten times an idle machine's
		if tries++; tries > 80 {
			return nil
		}
		return os.NewSyscallError("umount2", EBUSY)
	})
	if err != nil || tries != 81 {
		t.Errorf("%d tries: %v", tries, err)
	}
}
