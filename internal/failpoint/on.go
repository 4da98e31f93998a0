//go:build failpoint

package failpoint

import (
	"os"
	"time"
)

var (
	chosen = os.Getenv("CRUST_FAILPOINT")
	paused = os.Getenv("CRUST_FAILPOINT_PAUSE")
)

// Hit ends the process with SIGKILL when name is the chosen point, and waits a
// second when it is the point to pause at.
func Hit(name string) {
	if name == paused {
		time.Sleep(time.Second)
	}
	if name != chosen {
		return
	}
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill()
	}
	if err != nil {
		panic(err)
	}
	time.Sleep(time.Hour) // the signal is on its way
}
