package podvm

import (
	"errors"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// process identifies a process: its number may be another's later.
type process struct {
	PID   int    `json:"pid"`
	Began string `json:"began"` // see linux.ProcessStart
}

func processOf(pid int) (p process, err error) {
	p.PID = pid
	p.Began, err = linux.ProcessStart(pid)
	return p, err
}

// same tells whether the number is still this process's, which may be a zombie. If that cannot be told, it is: a pod that lives must not
// be taken for one that has ended.
func (p process) same() bool {
	if p.PID <= 0 {
		return false
	}
	began, err := linux.ProcessStart(p.PID)
	if err != nil {
		return !gone(err)
	}
	return began == p.Began
}

func gone(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, linux.ESRCH) }

// runs tells whether it runs. A zombie does not.
func (p process) runs() bool {
	if !p.same() {
		return false
	}
	end, err := linux.ProcessEnd(p.PID)
	if err != nil {
		return !gone(err)
	}
	defer end.Close()
	ended, _, err := linux.PollFile(end, 0)
	return err != nil || !ended
}

// kill kills it if that is certainly it.
func (p process) kill() {
	found, err := os.FindProcess(p.PID)
	if err != nil {
		return
	}
	if began, err := linux.ProcessStart(p.PID); err == nil && began == p.Began {
		_ = found.Kill() // it may have ended
	}
}
