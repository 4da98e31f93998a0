package loopdev

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// answerTime is how long a look at a loop device may take. The kernel asks the server
// of the file behind it, which may be gone, and any loop device of the node is looked
// at, whoever it belongs to.
const answerTime = 10 * time.Second

// binding tells one use of a loop device's number from the next: the kernel makes the
// directory anew for each. (So does diskseq, since Linux 6.5 and the stable kernels of
// July 2023 only.)
func binding(name string) (string, error) {
	st, err := linux.StatxPath("/sys/block/" + name + "/loop")
	return fmt.Sprint(st.Ino), err
}

// looks are those that have not come back, by name and binding. There is no second
// one meanwhile, for each keeps a thread.
type looks struct {
	sync.Mutex
	out map[string]bool
}

var pending looks

// within runs f, which looks at a device, and leaves it after a time. The key begins
// with the device's name.
func (l *looks) within(limit time.Duration, key string, f func() (Device, error)) (Device, error) {
	name, _, _ := strings.Cut(key, " ")
	silent := fault.New(fault.Busy, "what is behind /dev/%s is on a disk or server that does not answer: see the kernel's log (dmesg)", name)
	l.Lock()
	out := l.out[key]
	l.Unlock()
	if out {
		return Device{}, silent
	}
	type answer struct {
		Device
		error
	}
	done := make(chan answer, 1)
	go func() {
		d, err := f()
		done <- answer{d, err}
		l.Lock()
		defer l.Unlock()
		delete(l.out, key)
	}()
	// Nearly all answer at once and need no timer, which would wake a thread.
	runtime.Gosched()
	select {
	case a := <-done:
		return a.Device, a.error
	default:
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case a := <-done:
		return a.Device, a.error
	case <-timer.C:
	}
	l.Lock()
	defer l.Unlock()
	select {
	case a := <-done: // just now
		return a.Device, a.error
	default:
	}
	if l.out == nil {
		l.out = map[string]bool{}
	}
	l.out[key] = true
	return Device{}, silent
}

// open looks at a bound loop device.
func (n Nodes) open(name string) (Device, error) {
	if n.opens != nil {
		return n.opens(name)
	}
	key, err := binding(name)
	if err != nil {
		return Device{}, err
	}
	return pending.within(answerTime, name+" "+key, func() (Device, error) {
		node, _, _, err := n.node(name)
		if err != nil {
			return Device{}, err
		}
		loop, err := linux.Open(node, os.O_RDONLY)
		if err != nil {
			return Device{}, err
		}
		defer loop.Close()
		return status(loop)
	})
}
