package ownership

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// F02: a pod determines how deep a tree is, and each level waits to be continued. A walk must
// not have all levels open, or it exhausts the driver's descriptors.
func TestF02_ADeepTreeTakesBoundedDescriptors(t *testing.T) {
	dir := t.TempDir()
	const levels = 300
	each := 6 * max(4, runtime.GOMAXPROCS(0)) // a level has more than the walk's goroutines take at once
	script := `chdir $ARGV[0]; for (1..$ARGV[1]) { my $n = $_ % $ARGV[2]; mkdir $_ for (0..$ARGV[2]-1); chdir $n or die }`
	if out, err := exec.Command("perl", "-e", script, dir, strconv.Itoa(levels), strconv.Itoa(each)).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	defer func() {
		if out, err := exec.Command("find", dir, "-delete").CombinedOutput(); err != nil {
			t.Errorf("%v %s", err, out)
		}
	}()
	root, err := os.Open(dir)
	check(t, err)
	defer root.Close()
	for most, changed := range map[int64]int64{20: 0, 2 * levels: int64(levels * each)} {
		top, err := linux.OpenRootDir(root)
		check(t, err)
		w := &walk{gid: 4242, progress: &Progress{}, top: top, most: most}
		if changed == 0 {
			w.workers = 1 // others might finish each level before the next is read, and few directories would be open
		}
		err = w.run(t.Context())
		if changed == 0 && (!fault.Is(err, fault.State) || !strings.Contains(err.Error(), "more than 20 directories")) ||
			changed != 0 && err != nil {
			t.Errorf("with %d directories: %v", most, err)
		}
		if p := w.progress; changed != 0 && p.Looked.Load() != changed {
			t.Errorf("looked at %d, want %d", p.Looked.Load(), changed)
		}
		if n := w.open.Load(); n != 0 {
			t.Errorf("%d directories are said to be open", n)
		}
		check(t, top.Close())
	}
	left, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	if len(left) > 30 {
		t.Errorf("%d descriptors are open", len(left))
	}
}
