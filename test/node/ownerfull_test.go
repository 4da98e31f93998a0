package node

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// F06: a volume has no room for the record of its group: it is full, and the inode of its root is full of attributes. The pod starts all
// the same, and its files are the group's. Whoever has the volume next gets his files, too.
func TestF06_AFullVolumeIsGivenToAGroup(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	for _, fstype := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			v, target := up(t, n, "full-"+fstype, csiclient.Volume{FSType: fstype})
			ok(t, os.WriteFile(target+"/f", nil, 0o600))
			for i := range 3 { // the next one needs a block of its own
				ok(t, syscall.Setxattr(target, "user.a"+itoa(i), []byte("12345678"), 0))
			}
			fill(target + "/ballast")
			for i := range 20000 {
				if os.WriteFile(target+"/small"+itoa(i), []byte(strings.Repeat("x", 5000)), 0o600) != nil {
					break
				}
			}
			run(t, "sync", "-f", target)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			for _, group := range []string{"4242", "4343", "4242"} {
				err := n.Client.Publish(ctxOf(t), with(v, group), target, false)
				if err != nil {
					t.Error(err)
					continue
				}
				var st syscall.Stat_t
				ok(t, syscall.Stat(target+"/f", &st))
				if itoa(int(st.Gid)) != group {
					t.Errorf("its file is of group %d, not %s", st.Gid, group)
				}
				ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			}
			if fstype == "ext4" { // which has little room in an inode
				refused(t, n.Client.Publish(ctxOf(t), with(v, "4242", "fsGroupStrategy", "idmap"), target, false), codes.FailedPrecondition,
					v.ID, "no room for the record", "make room")
			}
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
			ok(t, os.Remove(target+"/ballast"))
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Publish(ctxOf(t), with(v, "4242"), target, false))
			got := run(t, "getfattr", "--absolute-names", "-n", ownership.Attribute, target)
			if !strings.Contains(got, "group=4242 state=clean") {
				t.Errorf("with room for it, the record is %s", got)
			}
			down(t, n, v.ID, target)
		})
	}
}

// F04: the record of an earlier group has no room to become that of a larger number. It does not say any more that the files are the first
// group's.
func TestF04_AFullVolumeKeepsNoRecordOfAnEarlierGroup(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v, target := up(t, n, "a", with(csiclient.Volume{FSType: "ext4"}, "7"))
	ok(t, os.WriteFile(target+"/f", nil, 0o600))
	ok(t, syscall.Setxattr(target, "user.a", []byte("12345678"), 0))
	fill(target + "/ballast")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	for _, group := range []string{"4242424242", "7"} {
		ok(t, n.Client.Publish(ctxOf(t), with(v, group), target, false))
		var st syscall.Stat_t
		ok(t, syscall.Stat(target+"/f", &st))
		if got := itoa(int(st.Gid)); got != group {
			t.Errorf("its file is of group %s, not %s", got, group)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
	}
	said(t, n, "no room for the record")
	down(t, n, v.ID)
}
