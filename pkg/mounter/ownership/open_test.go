package ownership

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// F02: a pod decides how deep a tree is, and each level waits to be read on. A walk must not have them all open, or
// the driver has no descriptors for anybody.
func TestF02_ADeepTreeTakesBoundedDescriptors(t *testing.T) {
	dir := t.TempDir()
	const levels, each = 300, 24 // a level has more than the walk's goroutines take at once
	script := `chdir $ARGV[0]; for (1..$ARGV[1]) { my $n = $_ % $ARGV[2]; mkdir $_ for (0..$ARGV[2]-1); chdir $n or die }`
	if out, err := exec.Command("perl", "-e", script, dir, strconv.Itoa(levels), strconv.Itoa(each)).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	defer func() {
		if out, err := exec.Command("find", dir, "-delete").CombinedOutput(); err != nil {
			t.Errorf("%v %s", err, out)
		}
	}()
	var before syscall.Rlimit
	check(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before))
	check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 64, Max: before.Max}))
	defer func() { check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before)) }()
	root, err := os.Open(dir)
	check(t, err)
	defer root.Close()
	for _, changed := range []int64{levels * each, 0} {
		top, err := linux.OpenRootDir(root)
		check(t, err)
		w := &walk{gid: 4242, progress: &Progress{}, top: top, most: 20}
		if err := w.run(t.Context()); err != nil {
			t.Error(err)
		}
		if p := w.progress; p.Looked.Load() != levels*each || p.Changed.Load() != changed {
			t.Errorf("looked at %d, changed %d; want %d, %d", p.Looked.Load(), p.Changed.Load(), levels*each, changed)
		}
		if w.open != 0 {
			t.Errorf("%d directories are said to be open", w.open)
		}
		check(t, top.Close())
	}
	left, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	if len(left) > 30 {
		t.Errorf("%d descriptors are open", len(left))
	}
}
