package node

import (
	"cmp"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestScale_ARestartLooksOnce: a start looks as often at one file, directory or device for many published volumes as for a few, so what it
// does is in proportion to their number, not to its square.
func TestScale_ARestartLooksOnce(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	var all []csiclient.Volume
	most := func(with int) (times int, file string) {
		t.Helper()
		for len(all) < with {
			v, _ := up(t, n, fmt.Sprint("v", len(all)), csiclient.Volume{FSType: "ext4"})
			all = append(all, v)
		}
		return mostOpened(opensOfARestart(t, n))
	}
	const few, many = 10, 40
	some, of := most(few)
	t.Logf("%d volumes: %s is opened %d times", few, of, some)
	if some == 0 {
		t.Fatal("the trace shows nothing")
	}
	if times, of := most(many); times > some+few/2 {
		t.Errorf("%d volumes: no file is opened more than %d times; %d volumes: %s is opened %d times", few, some, many, of, times)
	}
	for i, v := range all {
		down(t, n, v.ID, n.Target(fmt.Sprint("v", i)))
	}
}

// opensOfARestart kills csi-node, and counts how often the next one opens each file until it serves with all its pools.
func opensOfARestart(t *testing.T, n *testnode.Node) map[string]int {
	t.Helper()
	trace := filepath.Join(n.Dir, "trace")
	n.Kill()
	n.Under = []string{"strace", "-D", "-f", "-q", "-y", "-e", "trace=openat,openat2", "-o", trace}
	n.Start()
	traced := read(t, trace) // strace writes a call's line before the call returns
	n.Under = nil
	n.Restart()
	opens := map[string]int{}
	for _, found := range regexp.MustCompile(`"(.+)".* = (?:\d+<(.+)>|-1)`).FindAllStringSubmatch(traced, -1) {
		opens[cmp.Or(found[2], found[1])]++
	}
	return opens
}

func mostOpened(opens map[string]int) (times int, file string) {
	for name, n := range opens {
		if n > times {
			times, file = n, name
		}
	}
	return times, file
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
