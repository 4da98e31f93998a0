package linux

import (
	"errors"
	"sync"
	"syscall"
	"time"
)

// starts tracks the programs that this process has started recently. Between clone(2) and
// execve(2), a child has copies of all descriptors, including those of mounts and exclusively
// opened devices: they are briefly in use although nobody uses them.
var starts struct {
	sync.Mutex
	under int       // number of starts in progress
	last  time.Time // end of the last start
}

// Starting is called before a program is started; call the returned function afterwards.
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

// settleTime is how long a child may take from the middle of execve, after which its parent
// continues, until its close-on-exec descriptors are closed. On a busy machine it may have to wait
// for a processor.
const settleTime = 300 * time.Millisecond

func startedLately() bool {
	starts.Lock()
	defer starts.Unlock()
	return starts.under > 0 || time.Since(starts.last) < 2*settleTime
}

// Settle runs f, and repeats it while it fails with EBUSY and a child that is being started may be
// the cause. For any other holder it takes at most settleTime longer, and no longer if no program
// was started recently.
func Settle(f func() error) error {
	err := f()
	if !errors.Is(err, EBUSY) || !startedLately() {
		return err
	}
	// Every child now between clone and execve is through afterwards. The lock is not held while f
	// runs: that would keep every other program from starting.
	syscall.ForkLock.RLock()
	syscall.ForkLock.RUnlock() //nolint:staticcheck // an empty section is what is meant
	return whileBusy(f, func(waited time.Duration) bool { return waited < settleTime })
}

// Outlast is Settle for children of any process. The kubelet and runtimes start programs too, and
// for a moment their children have copies of their files on a volume or of the mount table. Use it
// to take a volume away: a holder that stays delays that by a second, and by another half second
// while this process keeps starting programs. On a machine so busy that two hundred tries take longer,
// the holder does not get on either: they are made, for five seconds at most.
func Outlast(f func() error) error {
	const least, most = 200, 5 * time.Second
	tries := 0
	return whileBusy(f, func(waited time.Duration) bool {
		tries++
		return waited < time.Second || waited < 1500*time.Millisecond && startedLately() || tries < least && waited < most
	})
}

func whileBusy(f func() error, goOn func(waited time.Duration) bool) error {
	for begin := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		if err := f(); !errors.Is(err, EBUSY) || !goOn(time.Since(begin)) {
			return err
		}
	}
}
