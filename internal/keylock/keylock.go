// Package keylock provides mutexes by key: a holder excludes only others with the same key. The
// work under a lock may hang, on a disk or server that does not answer.
package keylock

import "sync"

// Locks is ready to use as its zero value.
type Locks[K comparable] struct {
	mu   sync.Mutex // never held during a wait
	held map[K]chan struct{}
}

// Lock waits until nobody holds the lock of a key, and takes it.
func (l *Locks[K]) Lock(key K) (unlock func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.held[key] != nil {
		before := l.held[key]
		l.mu.Unlock()
		<-before
		l.mu.Lock()
	}
	if l.held == nil {
		l.held = map[K]chan struct{}{}
	}
	mine := make(chan struct{})
	l.held[key] = mine
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.held, key)
		close(mine)
	}
}
