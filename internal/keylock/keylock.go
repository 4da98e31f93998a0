// Package keylock is mutexes by key: who holds one keeps out those with the same key
// only. What is done meanwhile may hang, on a disk or server that does not answer.
package keylock

import "sync"

// Locks are ready to be used as they are.
type Locks[K comparable] struct {
	mu   sync.Mutex // never held while something is waited for
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
