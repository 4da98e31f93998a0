package testnode

import (
	"bytes"
	"sync"
)

// Log keeps what a process writes.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write adds to it.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String is all that was written.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
