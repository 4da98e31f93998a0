//go:build failpoint

package failpoint

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

var (
	// The name of a point, or name#7 for its seventh pass.
	chosen, nth = parse(os.Getenv("CRUST_FAILPOINT"))
	passed      atomic.Int64

	paused = os.Getenv("CRUST_FAILPOINT_PAUSE")
	file   = os.Getenv("CRUST_FAILPOINT_FILE")
)

// ErrInjected is the error of Err in mode "error".
var ErrInjected = errors.New("failpoint: injected error")

func parse(text string) (name string, nth int64) {
	name, times, found := strings.Cut(text, "#")
	if !found {
		return name, 1
	}
	nth, err := strconv.ParseInt(times, 10, 64)
	if err != nil {
		panic(err)
	}
	return name, nth
}

// Hit kills the process with SIGKILL if name is the chosen point, and waits a second if it is the
// point to pause at. It also applies the file's mode for the point: kill or hang.
func Hit(name string) {
	if name == paused {
		time.Sleep(time.Second)
	}
	if name == chosen && passed.Add(1) == nth {
		kill()
	}
	if mode(name) == "kill" {
		mark(name)
		kill()
	}
	hang(name)
}

// Err is Hit for a step that can also fail.
func Err(name string) error {
	Hit(name)
	if mode(name) == "error" {
		mark(name)
		return ErrInjected
	}
	return nil
}

func kill() {
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill()
	}
	if err != nil {
		panic(err)
	}
	time.Sleep(time.Hour) // the signal is on its way
}

// mode returns the file's mode for a point. The file contains "NAME MODE", and is read each time,
// so that a test can change it while the process runs.
func mode(name string) string {
	if file == "" {
		return ""
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	point, m, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	if point != name {
		return ""
	}
	return m
}

var hanging atomic.Bool

// mark leaves a file that names the point that was reached.
func mark(name string) {
	if err := os.WriteFile(file+".hit", []byte(name), 0o600); err != nil {
		panic(err)
	}
}

// hang waits while the file requests it. Only the first caller waits: others pass the point.
func hang(name string) {
	if mode(name) != "hang" || !hanging.CompareAndSwap(false, true) {
		return
	}
	defer hanging.Store(false)
	mark(name)
	for mode(name) == "hang" {
		time.Sleep(5 * time.Millisecond)
	}
}
