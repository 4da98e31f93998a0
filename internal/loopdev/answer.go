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

// answerTime is how long a look at a loop device may take. The kernel asks the server of the
// backing file, which may be gone, and every loop device of the node is examined, whoever owns it.
const answerTime = 10 * time.Second

// binding distinguishes successive uses of a loop device's number: the kernel makes the directory
// anew for each. (So does diskseq, but only since Linux 6.5 and the stable kernels of July 2023.)
func binding(name string) (string, error) {
	st, err := linux.StatxPath("/sys/block/" + name + "/loop")
	return fmt.Sprint(st.Ino), err
}

// looks holds the calls that have not returned, by name and binding. No second call starts
// meanwhile, because each keeps a thread.
type looks struct {
	sync.Mutex
	out map[string]bool
}

var pending looks

// within runs f, which examines a device, and abandons it after limit. The key begins with the
// device's name.
func (l *looks) within(limit time.Duration, key string, f func() (Device, error)) (Device, error) {
	name, _, _ := strings.Cut(key, " ")
	silent := fault.New(fault.Busy, "what is behind /dev/%s is on a disk or server that does not answer: see the kernel's log (dmesg)",
		name)
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

// open examines a bound loop device.
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
