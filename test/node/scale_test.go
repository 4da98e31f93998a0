package node

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestScale_ARestartLooksOnce: a start reads in proportion to the number of published volumes, not
// to its square. It looks at all loop devices of the machine, so the test runs alone, and once more
// if others came or went meanwhile.
func TestScale_ARestartLooksOnce(t *testing.T) {
	const few, factor, tries = 10, 4, 5
	for try := 1; ; try++ {
		some, many, calm := readsOfARestart(t, few, few*factor)
		t.Logf("%d reads for %d volumes, %d for %d", some, few, many, few*factor)
		if !calm && try < tries {
			continue
		}
		if many > 2*factor*some {
			t.Errorf("%d reads for %d volumes, %d for %d", some, few, many, few*factor)
		}
		return
	}
}

// readsOfARestart returns how many system calls that read a start makes for few and for many volumes. calm: nobody else's loop devices came
// or went.
func readsOfARestart(t *testing.T, few, many int) (forFew, forMany int, calm bool) {
	t.Helper()
	n := testnode.New(t, "")
	var all []csiclient.Volume
	calm = true
	others := -1
	reads := func() int {
		t.Helper()
		n.Restart()
		io := read(t, fmt.Sprintf("/proc/%d/io", n.PID()))
		number, err := strconv.Atoi(regexp.MustCompile(`syscr: (\d+)`).FindStringSubmatch(io)[1])
		ok(t, err)
		bound, err := filepath.Glob("/sys/block/loop*/loop")
		ok(t, err)
		now := len(bound) - len(all)
		calm = calm && (others < 0 || others == now)
		others = now
		return number
	}
	publish := func(to int) {
		t.Helper()
		for len(all) < to {
			v, _ := up(t, n, fmt.Sprint("v", len(all)), csiclient.Volume{FSType: "ext4"})
			all = append(all, v)
		}
	}
	none := reads()
	publish(few)
	forFew = reads() - none
	publish(many)
	forMany = reads() - none
	for i, v := range all {
		down(t, n, v.ID, n.Target(fmt.Sprint("v", i)))
	}
	return forFew, forMany, calm
}

// TestScale_APromiseLooksAtNoFile: a new volume takes no longer if there are many, as long as it
// fits.
func TestScale_APromiseLooksAtNoFile(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	have := 0
	calls := func(with int) int {
		t.Helper()
		for ; have < with; have++ {
			create(t, n, fmt.Sprint("v", have), csiclient.Volume{FSType: "ext4"})
		}
		end := n.Tampered("statx,newfstatat,openat,openat2", "delay_exit=1")
		create(t, n, fmt.Sprint("v", have), csiclient.Volume{FSType: "ext4"})
		have++
		end()
		return strings.Count(read(t, filepath.Join(n.Dir, "trace")), "\n")
	}
	few := calls(5)
	if many := calls(60); many > few+20 {
		t.Errorf("%d calls beside 5 volumes, %d beside 60", few, many)
	}
}

// TestScale_ACallLooksAtItsOwnDevice: of a node's loop devices, which may be thousands, no call in the life of a volume looks at another
// volume's.
func TestScale_ACallLooksAtItsOwnDevice(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	other, at := up(t, n, "other", csiclient.Volume{FSType: "ext4"})
	device := filepath.Base(strings.TrimSpace(run(t, "losetup", "-nO", "NAME", "-j", image(n, other.ID))))
	end := n.Tampered("statx,newfstatat,readlinkat,openat,openat2", "delay_exit=1")
	v, target := up(t, n, "one", csiclient.Volume{FSType: "ext4"})
	down(t, n, v.ID, target)
	end()
	trace := read(t, filepath.Join(n.Dir, "trace"))
	if !strings.Contains(trace, "/loop-control") {
		t.Error("the trace does not even show how the volume got its device")
	}
	for line := range strings.Lines(trace) {
		if regexp.MustCompile(`/` + device + `\b`).MatchString(line) {
			t.Errorf("%s is the other volume's: %s", device, line)
		}
	}
	down(t, n, other.ID, at)
}
