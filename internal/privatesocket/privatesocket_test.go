package privatesocket

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func endpoint(t *testing.T) (endpoint, path string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "s") // short: a socket path has at most 108 bytes
	ok(t, err)
	t.Cleanup(func() { ok(t, os.Remove(dir)) }) // nothing is left in it
	path = filepath.Join(dir, "socket")
	return "unix://" + path, path
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func refused(t *testing.T, endpoint, words string) {
	t.Helper()
	l, err := Listen(endpoint, 0o600)
	if err == nil {
		l.Close()
		t.Fatalf("%s was listened at", endpoint)
	}
	if !strings.Contains(err.Error(), words) {
		t.Error(err)
	}
}

func TestASocketHasItsModeAndAnotherServerIsLeftAlone(t *testing.T) {
	at, path := endpoint(t)
	l, err := Listen(at, 0o600)
	ok(t, err)
	st, err := os.Lstat(path)
	ok(t, err)
	if st.Mode().Perm() != 0o600 {
		t.Error(st.Mode())
	}
	refused(t, at, "another server answers")
	c, err := net.Dial("unix", path)
	ok(t, err)
	c.Close()
	ok(t, l.Close())
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

// A killed server leaves its socket behind.
func TestASocketWithoutAServerIsTakenOver(t *testing.T) {
	at, path := endpoint(t)
	dead, err := net.Listen("unix", path)
	ok(t, err)
	dead.(*net.UnixListener).SetUnlinkOnClose(false)
	ok(t, dead.Close())
	l, err := Listen(at, 0o600)
	ok(t, err)
	ok(t, l.Close())
}

// A server that is too busy to accept is still there: it keeps its socket.
func TestAServerThatDoesNotAcceptKeepsItsSocket(t *testing.T) {
	at, path := endpoint(t)
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	ok(t, err)
	defer syscall.Close(fd)
	ok(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}))
	defer os.Remove(path)
	ok(t, syscall.Listen(fd, 0))
	full := false
	for range 10 { // until its queue is full
		c, err := net.Dial("unix", path)
		if err != nil {
			full = true
			break
		}
		defer c.Close()
	}
	if !full {
		t.Fatal("the queue takes any number of connections")
	}
	before, err := os.Lstat(path)
	ok(t, err)
	refused(t, at, "cannot tell")
	if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the socket is another one: %v", err)
	}
}

func TestWhatIsNoSocketIsLeftAlone(t *testing.T) {
	at, path := endpoint(t)
	ok(t, os.WriteFile(path, []byte("data"), 0o600))
	refused(t, at, "no socket")
	if b, err := os.ReadFile(path); err != nil || string(b) != "data" {
		t.Errorf("%q %v", b, err)
	}
	ok(t, os.Remove(path))
	for _, wrong := range []string{path, "unix://socket", "tcp://127.0.0.1:1", ""} {
		refused(t, wrong, "unix:///absolute/path")
	}
}

// Nobody else can connect between two system calls, whatever the umask is.
func TestASocketHasItsModeFromTheBeginning(t *testing.T) {
	before := syscall.Umask(0)
	defer syscall.Umask(before)
	at, path := endpoint(t)
	var seen atomic.Int64
	end, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for {
			select {
			case <-end:
				return
			default:
			}
			if st, err := os.Lstat(path); err == nil {
				seen.Add(1)
				if st.Mode().Perm() != 0o600 {
					t.Errorf("the socket had the mode %s", st.Mode())
					return
				}
			}
		}
	}()
	for range 2000 {
		l, err := Listen(at, 0o600)
		ok(t, err)
		ok(t, l.Close())
	}
	l, err := Listen(at, 0o600)
	ok(t, err)
	for seen.Load() == 0 { // a busy machine has not looked yet
		time.Sleep(time.Millisecond)
	}
	ok(t, l.Close())
	close(end)
	<-watched
	syscall.Umask(0o077)
	l, err = Listen(at, 0o666)
	ok(t, err)
	defer l.Close()
	st, err := os.Lstat(path)
	ok(t, err)
	if st.Mode().Perm() != 0o666 {
		t.Errorf("the umask took rights away: %s", st.Mode())
	}
}

// Of servers that start together, one gets the socket and keeps it.
func TestOneOfServersThatStartTogether(t *testing.T) {
	at, path := endpoint(t)
	for range 300 {
		dead, err := net.Listen("unix", path)
		ok(t, err)
		dead.(*net.UnixListener).SetUnlinkOnClose(false)
		ok(t, dead.Close())
		var got atomic.Int32
		var all sync.WaitGroup
		listeners := make([]net.Listener, 4)
		for i := range listeners {
			all.Go(func() {
				l, err := Listen(at, 0o600)
				if err == nil {
					got.Add(1)
					listeners[i] = l
				} else if !strings.Contains(err.Error(), "another server answers") {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if n := got.Load(); n != 1 {
			t.Fatalf("%d servers have the socket", n)
		}
		c, err := net.Dial("unix", path)
		ok(t, err)
		c.Close()
		for _, l := range listeners {
			if l != nil {
				ok(t, l.Close())
			}
		}
	}
}
