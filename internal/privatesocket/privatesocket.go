// Package privatesocket makes unix sockets that are never reachable with wider permissions than
// their mode, and leaves those of other servers alone.
package privatesocket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Path returns the path of an endpoint, unix:///absolute/path.
func Path(endpoint string) (string, error) {
	path, ok := strings.CutPrefix(endpoint, "unix://")
	if !ok || !filepath.IsAbs(path) {
		return "", fmt.Errorf("endpoint %q: give unix:///absolute/path", endpoint)
	}
	return path, nil
}

// Listen makes the socket of an endpoint, with that mode, and its directory. It takes over a socket
// whose server is gone. It leaves alone a socket that answers, or whose state is unclear. Close
// removes the socket.
func Listen(endpoint string, mode os.FileMode) (net.Listener, error) {
	path, err := Path(endpoint)
	if err != nil {
		return nil, err
	}
	directory := os.FileMode(0o750)
	if mode&0o006 != 0 {
		directory = 0o755
	}
	if err := os.MkdirAll(filepath.Dir(path), directory); err != nil {
		return nil, err
	}
	unlock, err := lock(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", path, err)
	}
	defer unlock()
	if err := removeDead(path); err != nil {
		return nil, err
	}
	return linux.ListenPrivate(path, mode)
}

// patience is how long Listen waits for another server: to answer, or to finish its own Listen.
const patience = 2 * time.Second

// lock keeps servers that start together apart. Otherwise one could remove the socket that another
// has just made: until listen(2), such a socket looks dead.
func lock(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(2 * patience); ; time.Sleep(10 * time.Millisecond) {
		if err = linux.Flock(f); !errors.Is(err, linux.EAGAIN) || time.Now().After(end) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("flock %s: %w", dir, err), f.Close())
	}
	return func() { f.Close() }, nil // which ends the lock
}

// removeDead removes a socket whose server is gone.
func removeDead(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("endpoint %s: a file that is no socket lies there; it was left alone", path)
	}
	c, err := net.DialTimeout("unix", path, patience)
	switch {
	case err == nil:
		return errors.Join(fmt.Errorf("endpoint %s: another server answers there; stop it first", path), c.Close())
	case errors.Is(err, linux.ECONNREFUSED): // connect(2): nobody listens
		return os.Remove(path)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return fmt.Errorf("endpoint %s: cannot tell whether another server has it: %w; stop that server, or remove the socket", path, err)
}

// Same reports whether both describe one socket. A file system uses inode numbers again, so the time has to be the same too.
func Same(a, b os.FileInfo) bool { return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) }
