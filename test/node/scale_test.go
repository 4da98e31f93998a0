package node

import (
	"fmt"
	"regexp"
	"strconv"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestScale_ARestartLooksOnce: what a start reads grows as the volumes that are
// published do, not with their square.
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
