package linux

import (
	"errors"
	"sync"
	"syscall"
	"time"
)

// starts are the programs that this process has started lately. A child has
// copies of all descriptors between clone(2) and execve(2), those of mounts and
// exclusively opened devices too: for that moment they are in use though nobody
// uses them.
var starts struct {
	sync.Mutex
	under int       // way
	last  time.Time // one had been started
}

// Starting is told before a program is started, and what it gives is called
// afterwards.
func Starting() (started func()) {
	starts.Lock()
	defer starts.Unlock()
	starts.under++
	return func() {
		starts.Lock()
		defer starts.Unlock()
		starts.under--
		starts.last = time.Now()
	}
}

// settleTime is how long a child may take from the end of execve's first half,
// after which its parent goes on, until it has closed what it is not to have. On
// a busy machine it may have to wait for a processor.
const settleTime = 300 * time.Millisecond

func startedLately() bool {
	starts.Lock()
	defer starts.Unlock()
	return starts.under > 0 || time.Since(starts.last) < 2*settleTime
}

// Settle runs f, and runs it again while it fails with EBUSY and the reason may be
// a child that is being started. Where the holder is somebody else it takes at
// most settleTime longer, and no longer at all while no program was started
// lately.
func Settle(f func() error) error {
	err := f()
	if !errors.Is(err, EBUSY) || !startedLately() {
		return err
	}
	// Whoever is between clone and execve now is through afterwards. It is not held
	// while f runs: that would keep every other program from starting.
	syscall.ForkLock.RLock()
	syscall.ForkLock.RUnlock() //nolint:staticcheck // an empty section is what is meant
	return whileBusy(f, func(waited time.Duration) bool { return waited < settleTime })
}

// Outlast is Settle whoever's child it may be. The kubelet and runtimes start programs too, and what they
// had of a volume, files or a copy of the mount table, their children have for a moment. It is for what
// takes a volume away: a holder that stays makes that a second longer, and half a second more while this
// process goes on starting programs.
func Outlast(f func() error) error {
	return whileBusy(f, func(waited time.Duration) bool {
		return waited < time.Second || waited < 1500*time.Millisecond && startedLately()
	})
}

func whileBusy(f func() error, goOn func(waited time.Duration) bool) error {
	for begin := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		if err := f(); !errors.Is(err, EBUSY) || !goOn(time.Since(begin)) {
			return err
		}
	}
}
