package podguest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// process is a container's first process, or a further one.
type process struct {
	container string
	dir       string // config, pid and log
	further   bool   // not the first of its container
	terminal  bool
	joined    bool // its process namespace is not its container's own

	prepared time.Time // when it was, if it is a further one

	begun  bool
	stdin  *os.File    // what is written here is the process's input
	out    []*os.File  // standard output and error
	theirs []*os.File  // the ends that the process inherits, until it has
	found  *os.Process // its handle stays its own when its number is another's
}

func newProcess(container, dir string, config []byte) (*process, error) {
	var c struct{ Process struct{ Terminal bool } }
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fault.New(fault.Invalid, "config.json: %w", err)
	}
	p := &process{container: container, dir: dir, terminal: c.Process.Terminal}
	return p, os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600)
}

func newExec(container, dir string, spec []byte) (*process, error) {
	var c struct{ Terminal bool }
	if err := json.Unmarshal(spec, &c); err != nil {
		return nil, fault.New(fault.Invalid, "process: %w", err)
	}
	p := &process{container: container, dir: dir, terminal: c.Terminal, further: true}
	return p, os.WriteFile(filepath.Join(dir, "process.json"), spec, 0o600)
}

// sockets is a short path: a socket's has at most 107 bytes, unix(7), and containerd's ids have 64.
const sockets = "/run/crust"

// make has runc make the process, with its streams: "create" a container whose process waits, or "exec" a further one.
func (p *process) make(ctx context.Context, command string, options ...string) error {
	pidFile, log, socket := filepath.Join(p.dir, "pid"), filepath.Join(p.dir, "log"), filepath.Join(sockets, rand.Text())
	args := []string{"--root", state, "--log", log, command, "--pid-file", pidFile}
	cmd := exec.CommandContext(ctx, runc)
	if p.further {
		// A runc that is killed leaves behind what it has made, and nobody waits for that. The kernel lets the first process of a namespace
		// end only after each other one was waited for: the container would never end. So a caller that has gone is noticed afterwards.
		cmd.Cancel, cmd.WaitDelay = func() error { return os.ErrProcessDone }, time.Minute
	}
	console := make(chan *os.File, 1)
	if p.terminal {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			return err
		}
		defer func() { _ = l.Close() }()
		args = append(args, "--console-socket", socket)
		go func() { console <- acceptConsole(l) }()
	} else if err := p.pipes(cmd); err != nil {
		return err
	}
	cmd.Args = append(append([]string{"runc"}, append(args, options...)...), p.container)
	err := cmd.Run()
	closeAll(p.theirs)
	p.theirs = nil
	if err != nil {
		said, _ := os.ReadFile(log) // there may be none
		return fault.New(fault.State, "%s", reason(string(said), err))
	}
	b, err := os.ReadFile(pidFile)
	if err == nil {
		var pid int
		if pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			p.found, err = os.FindProcess(pid)
		}
	}
	if err != nil || !p.terminal {
		return err
	}
	// runc sends it before it ends.
	select {
	case f := <-console:
		if f != nil {
			p.stdin, p.out = f, []*os.File{f}
			return nil
		}
	case <-time.After(time.Minute):
	}
	return errors.New("runc sent no terminal")
}

func acceptConsole(l *net.UnixListener) *os.File {
	c, err := l.AcceptUnix()
	if err != nil {
		return nil
	}
	defer func() { _ = c.Close() }()
	f, err := linux.ReceiveFile(c)
	if err != nil {
		return nil
	}
	return f
}

func (p *process) pipes(cmd *exec.Cmd) error {
	for i := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		if i == 0 {
			p.stdin, cmd.Stdin = w, r
			p.theirs = append(p.theirs, r)
			continue
		}
		p.out, p.theirs = append(p.out, r), append(p.theirs, w)
		if i == 1 {
			cmd.Stdout = w
		} else {
			cmd.Stderr = w
		}
	}
	return nil
}

// reason finds the error in runc's log: the last message.
func reason(log string, err error) string {
	lines := strings.Split(strings.TrimSpace(log), "\n")
	last := lines[len(lines)-1]
	if _, msg, ok := strings.Cut(last, ` msg="`); ok {
		if text, uerr := strconv.Unquote(`"` + strings.TrimRight(msg, "\n")); uerr == nil {
			return text
		}
		return strings.TrimSuffix(msg, `"`)
	}
	if last != "" {
		return last
	}
	return fmt.Sprintf("runc: %v", err)
}

// start lets a container's first process go on, or makes a further process.
func (p *process) start(ctx context.Context) error {
	if p.further {
		return p.make(ctx, "exec", "--detach", "--process", filepath.Join(p.dir, "process.json"))
	}
	log := filepath.Join(p.dir, "log")
	if err := exec.CommandContext(ctx, runc, "--root", state, "--log", log, "start", p.container).Run(); err != nil {
		said, _ := os.ReadFile(log) // there may be none
		return fault.New(fault.State, "%s", reason(string(said), err))
	}
	return nil
}

// wait returns the exit status of a process whose first parent has ended.
func (p *process) wait() int {
	if s, err := p.found.Wait(); err == nil {
		return linux.ExitStatus(s)
	}
	const unknown = 255
	return unknown
}

func (p *process) signal(number int) { _ = p.found.Signal(linux.Signal(number)) } // it may have ended

func (p *process) close() {
	closeAll(append(p.theirs, p.out...))
	if p.stdin != nil && !p.terminal {
		p.stdin.Close()
	}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
