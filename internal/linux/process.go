package linux

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// AsUser starts a program as another user without privileges, in a session of its own. It ends with SIGKILL when the thread that started
// it ends.
func AsUser(uid uint32, groups ...uint32) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Setsid: true, Pdeathsig: syscall.SIGKILL, Credential: &syscall.Credential{Uid: uid, Gid: uid, Groups: groups},
	}
}

// AsRootOf starts a program as root of a new user namespace, with a mount namespace of its own. Its ids are those of this namespace from
// uid and gid on, size of each. The program ends with SIGKILL when the thread that started it ends.
func AsRootOf(uid, gid, size uint32) *syscall.SysProcAttr {
	from := func(id uint32) []syscall.SysProcIDMap {
		return []syscall.SysProcIDMap{{HostID: int(id), Size: int(size)}}
	}
	return &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL, Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, Credential: &syscall.Credential{},
		UidMappings: from(uid), GidMappings: from(gid), GidMappingsEnableSetgroups: true,
	}
}

// GroupOf returns the group that owns a file.
func GroupOf(path string) (uint32, error) {
	var st unix.Stat_t
	err := call("stat", func() error { return unix.Stat(path, &st) })
	return st.Gid, err
}

// Signal is a signal by its number, signal(7).
func Signal(number int) os.Signal { return syscall.Signal(number) }

// SignalNumber is a signal's number. Those that come of what this process does itself have none: 0.
func SignalNumber(s os.Signal) int {
	switch s, _ := s.(syscall.Signal); s {
	case syscall.SIGURG, syscall.SIGCHLD, syscall.SIGPIPE:
		return 0
	default:
		return int(s)
	}
}

// ExitStatus is how a shell tells a process's end: its exit status, or 128 and the number of the signal that killed it.
func ExitStatus(s *os.ProcessState) int {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return s.ExitCode()
}

// AdoptOrphans makes this process the parent of its descendants whose own parents end, prctl(2) PR_SET_CHILD_SUBREAPER.
func AdoptOrphans() error {
	return call("prctl", func() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) })
}

// ReceiveFile receives a descriptor over a unix socket, SCM_RIGHTS of unix(7).
func ReceiveFile(c *net.UnixConn) (*os.File, error) {
	const descriptors = 4 << 2
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(descriptors))
	_, n, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return nil, err
	}
	var file *os.File
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // another kind of message
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			if f := os.NewFile(uintptr(fd), "received"); file == nil {
				file = f
			} else {
				f.Close()
			}
		}
	}
	if file == nil {
		return nil, errors.New("no descriptor came")
	}
	return file, nil
}

// SocketPair makes two connected sockets, socketpair(2).
func SocketPair() (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "socket"), os.NewFile(uintptr(fds[1]), "socket"), nil
}

// SyncWithin is sync(2): all file systems are written out. It does not wait for longer than that: one of them may not answer.
func SyncWithin(most time.Duration) {
	done := make(chan struct{})
	go func() { unix.Sync(); close(done) }()
	select {
	case <-done:
	case <-time.After(most):
	}
}

// RawTerminal switches a terminal to raw mode, as cfmakeraw(3) does: what is typed goes through unchanged.
func RawTerminal(f *os.File) error {
	var t *unix.Termios
	err := call("TCGETS", func() (err error) { t, err = unix.IoctlGetTermios(fdOf(f), unix.TCGETS); return err })
	if err != nil {
		return err
	}
	t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	t.Oflag &^= unix.OPOST
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	return call("TCSETS", func() error { return unix.IoctlSetTermios(fdOf(f), unix.TCSETS, t) })
}

// Window returns a terminal's size in characters.
func Window(f *os.File) (columns, rows uint16, err error) {
	err = call("TIOCGWINSZ", func() error {
		w, err := unix.IoctlGetWinsize(fdOf(f), unix.TIOCGWINSZ)
		if err == nil {
			columns, rows = w.Col, w.Row
		}
		return err
	})
	return columns, rows, err
}

// SetWindow sets a terminal's size in characters. Its processes get SIGWINCH.
func SetWindow(f *os.File, columns, rows uint16) error {
	return call("TIOCSWINSZ", func() error {
		return unix.IoctlSetWinsize(fdOf(f), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows})
	})
}

// WindowChange is the signal that a terminal's size has changed.
const WindowChange = unix.SIGWINCH

// SetSysctl sets a kernel parameter by its name, such as net.ipv4.ip_forward, sysctl(8).
func SetSysctl(name, value string) error {
	path := "/proc/sys/"
	for _, c := range []byte(name) {
		switch c {
		case '.':
			c = '/'
		case '/':
			c = '.'
		}
		path += string(c)
	}
	root, err := os.OpenRoot("/proc/sys")
	if err != nil {
		return err
	}
	defer root.Close()
	f, err := root.OpenFile(path[len("/proc/sys/"):], os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("sysctl %s: %w", name, err)
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// LeaveInitialRoot binds the root directory over itself, by way of dir. The kernel refuses pivot_root(2), which container runtimes need,
// while the root is the initial one, that of an initramfs.
func LeaveInitialRoot(dir string) error {
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"mount", func() error { return unix.Mount("/", dir, "", unix.MS_BIND|unix.MS_REC, "") }},
		{"chdir", func() error { return unix.Chdir(dir) }},
		{"mount", func() error { return unix.Mount(dir, "/", "", unix.MS_MOVE, "") }},
		{"chroot", func() error { return unix.Chroot(".") }},
		{"chdir", func() error { return unix.Chdir("/") }},
	} {
		if err := call(step.name, step.do); err != nil {
			return err
		}
	}
	return nil
}
