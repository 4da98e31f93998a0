package podvm

import (
	"fmt"
	"io"
	"sync"
)

// limited drops what exceeds its limit, so that a guest's console cannot fill the disk.
type limited struct {
	sync.Mutex
	w    io.Writer
	left int
	cut  bool // something was dropped, perhaps the end of a line
}

func (l *limited) Write(b []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	n := min(len(b), l.left)
	l.left -= n
	l.cut = l.cut || n < len(b)
	if n > 0 {
		if _, err := l.w.Write(b[:n]); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// leave makes the limit n bytes from here on, which is the beginning of a line.
func (l *limited) leave(n int) {
	l.Lock()
	defer l.Unlock()
	l.left = n
	if l.cut {
		fmt.Fprintln(l.w)
	}
}
