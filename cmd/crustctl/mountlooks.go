package main

import (
	"fmt"
	"sync"
	"time"
)

// lookPatience is how long a mount may take to answer.
const lookPatience = 2 * time.Second

// mountLooks runs calls that may hang, such as stat of a mount whose server is gone.
type mountLooks struct {
	mu      sync.Mutex
	running map[string]bool
}

// lookWithin returns the result of f for a path, or an error if f takes longer than lookPatience.
// Until f returns, that path is not looked at again: `top` polls often, and each hung call keeps a
// thread.
func lookWithin[T any](l *mountLooks, path string, f func() (T, error)) (found T, err error) {
	type result struct {
		found T
		err   error
	}
	hangs := fmt.Errorf("%s does not answer", path)
	if !l.begin(path) {
		return found, hangs
	}
	back := make(chan result, 1)
	go func() {
		found, err := f()
		l.end(path)
		back <- result{found, err}
	}()
	select {
	case r := <-back:
		return r.found, r.err
	case <-time.After(lookPatience):
		return found, hangs
	}
}

// begin reports whether a look may begin, and records it.
func (l *mountLooks) begin(path string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running[path] {
		return false
	}
	if l.running == nil {
		l.running = map[string]bool{}
	}
	l.running[path] = true
	return true
}

func (l *mountLooks) end(path string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.running, path)
}
