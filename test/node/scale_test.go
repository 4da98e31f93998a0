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
// to its square. It looks at all loop devices of the machine, so the test runs alone.
func TestScale_ARestartLooksOnce(t *testing.T) {
	n := testnode.New(t, "")
	reads := func() int {
		t.Helper()
		n.Restart()
		io := read(t, fmt.Sprintf("/proc/%d/io", n.PID()))
		number, err := strconv.Atoi(regexp.MustCompile(`syscr: (\d+)`).FindStringSubmatch(io)[1])
		ok(t, err)
		return number
	}
	var all []csiclient.Volume
	publish := func(to int) {
		t.Helper()
		for len(all) < to {
			v, _ := up(t, n, fmt.Sprint("v", len(all)), csiclient.Volume{FSType: "ext4"})
			all = append(all, v)
		}
	}
	const few, factor = 10, 4
	none := reads()
	publish(few)
	some := reads() - none
	publish(few * factor)
	many := reads() - none
	t.Logf("%d reads for %d volumes, %d for %d", some, few, many, few*factor)
	if many > 2*factor*some {
		t.Errorf("%d reads for %d volumes, %d for %d", some, few, many, few*factor)
	}
	for i, v := range all {
		down(t, n, v.ID, n.Target(fmt.Sprint("v", i)))
	}
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
