package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// ErrGone is the error for a sandbox that has provably ended. One that is merely unreachable still
// uses its volumes.
var ErrGone = errors.New("the sandbox has ended")

// process is the one whose end is the sandbox's. The kernel reuses pids, so more is recorded.
type process struct {
	PID     int    `json:"pid,omitempty"`
	Started string `json:"started,omitempty"` // see linux.ProcessStart
	// Namespace of the pid: in another one the pid names another process or none.
	Namespace string `json:"pidNamespace,omitempty"`
}

// identify returns the identity of a running process. The descriptor is a pidfd that reports its
// end.
func identify(pid int) (process, *os.File, error) {
	p := process{PID: pid}
	f, err := linux.ProcessEnd(pid)
	if err != nil {
		return p, nil, gone(pid, err)
	}
	if p.Started, err = linux.ProcessStart(pid); err == nil {
		p.Namespace, err = linux.PIDNamespace()
	}
	if err != nil {
		return p, nil, errors.Join(gone(pid, err), f.Close())
	}
	return p, f, nil
}

// find is identify for a recorded process; ErrGone if that has ended.
func (p process) find() (*os.File, error) {
	here, err := linux.PIDNamespace()
	if err != nil {
		return nil, err
	}
	if here != p.Namespace {
		return nil, fault.New(fault.State,
			"process %d is of another pid namespace (%s, and this is %s), so it cannot be told whether it lives", p.PID, p.Namespace, here)
	}
	now, f, err := identify(p.PID)
	if err != nil {
		return nil, err
	}
	if now.Started != p.Started {
		return nil, errors.Join(fmt.Errorf("process %d is another one now: %w", p.PID, ErrGone), f.Close())
	}
	return f, nil
}

func gone(pid int, err error) error {
	if errors.Is(err, linux.ESRCH) || errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.State, "process %d: %w", pid, ErrGone)
	}
	return fmt.Errorf("process %d: %w", pid, err)
}
