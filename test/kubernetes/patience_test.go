//go:build kubernetes

package kubernetes_test

import (
	"cmp"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience multiplies all timeouts: a machine may be busy, and a guest's processor is emulated.
var patience, _ = strconv.Atoi(cmp.Or(os.Getenv("CRUST_KUBERNETES_PATIENCE"), "3"))

// pace is how slow this machine is now: how long kubectl takes lately, in units of its quickest run.
type pace struct {
	mu               sync.Mutex
	quickest, lately time.Duration
}

// thisMachine's pace is that of every kubectl get of this run.
var thisMachine pace

// took learns from one run of kubectl.
func (p *pace) took(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.quickest == 0 || d < p.quickest {
		p.quickest = d
	}
	if p.lately == 0 {
		p.lately = d
	}
	p.lately += (d - p.lately) / 8
}

// slowness is at least 1. It is at most 6: what has ended must be told before the tests' own time ends.
func (p *pace) slowness() float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.quickest == 0 {
		return 1
	}
	return min(max(1, float64(p.lately)/float64(p.quickest)/2), 6)
}

// wait is how long to wait at most for what takes an idle machine a part of d.
func wait(d time.Duration) time.Duration {
	return time.Duration(float64(patience) * thisMachine.slowness() * float64(d))
}

// patient lengthens the timeout of a kubectl command.
func patient(argv []string) []string {
	argv = slices.Clone(argv)
	for i, a := range argv {
		if d, err := time.ParseDuration(strings.TrimPrefix(a, "--timeout=")); err == nil {
			argv[i] = "--timeout=" + wait(d).String()
		}
	}
	return argv
}

// unfinished tells whether a command that only waits gave up although the machine has become so slow that it may wait longer.
func unfinished(begin time.Time, argv []string, err error) bool {
	if err == nil || (argv[0] != "wait" && argv[0] != "rollout") || !strings.Contains(err.Error(), "timed out waiting") {
		return false
	}
	for _, a := range argv {
		if d, err := time.ParseDuration(strings.TrimPrefix(a, "--timeout=")); err == nil {
			return time.Since(begin) < wait(d)
		}
	}
	return false
}

func TestFleet_AWaitIsLongerOnASlowMachine(t *testing.T) {
	t.Parallel()
	var p pace
	if got := p.slowness(); got != 1 {
		t.Errorf("%v before anything was measured", got)
	}
	for range 20 {
		p.took(100 * time.Millisecond)
	}
	if got := p.slowness(); got != 1 {
		t.Errorf("%v on an idle machine", got)
	}
	for range 50 {
		p.took(time.Second)
	}
	if got := p.slowness(); got < 4.5 || got > 5 {
		t.Errorf("%v when all takes ten times as long", got)
	}
	for range 50 {
		p.took(time.Minute)
	}
	if got := p.slowness(); got != 6 {
		t.Errorf("%v when nothing goes", got)
	}
	timedOut := errors.New("error: timed out waiting for the condition on pods/p")
	for _, c := range []struct {
		argv []string
		ago  time.Duration
		err  error
		want bool
	}{
		{[]string{"wait", "--timeout=90s"}, time.Second, timedOut, true},
		{[]string{"rollout", "status", "--timeout=90s"}, time.Second, timedOut, true},
		{[]string{"wait", "--timeout=90s"}, 24 * time.Hour, timedOut, false},
		{[]string{"delete", "--timeout=90s"}, time.Second, timedOut, false},
		{[]string{"wait", "--timeout=90s"}, time.Second, errors.New("not found"), false},
		{[]string{"wait", "--timeout=90s"}, time.Second, nil, false},
	} {
		if got := unfinished(time.Now().Add(-c.ago), c.argv, c.err); got != c.want {
			t.Errorf("%v after %s with %v: %v", c.argv, c.ago, c.err, got)
		}
	}
}
