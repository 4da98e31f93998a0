package driver_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// node makes a device node of the rig's own, with the number of a device. If it is removed, the disk was pulled.
func (r *rig) node(name, device string) (path string) {
	r.t.Helper()
	path = r.dir + "/node-" + name
	shell(r.t, "rm -f "+path+"; mknod "+path+" b $(mountpoint -x "+device+" | tr : ' ')")
	return path
}

// C08: the disk that a guest had was pulled, or another disk is at its path now. The pod can end, but not while the guest has the disk.
func TestC08_ADeferralOfADiskThatIsGoneEnds(t *testing.T) {
	for _, now := range []string{"pulled", "another disk"} {
		for _, restarted := range []string{"", "restarted", "torn"} {
			t.Run(now+" "+restarted, func(t *testing.T) {
				r := newRig(t)
				device := r.disk("disk", "mkfs.ext4 -q "+r.dir+"/disk")
				node := r.node("a", device)
				target := r.deferred("v", node).GetTargetPath()
				guest, err := linux.Open(device, os.O_RDWR|linux.OExcl)
				must(t, err)
				other := (*os.File)(nil)
				if now == "pulled" {
					must(t, os.Remove(node))
				} else { // which its own user holds: that says nothing about the guest
					another := r.disk("other", "true")
					r.node("a", another)
					other, err = linux.Open(another, os.O_RDWR|linux.OExcl)
					must(t, err)
					defer other.Close()
				}
				if restarted != "" {
					r.stop()
					if restarted == "torn" { // the record of its stage
						r.spoil("state/staged", "torn")
					}
					r.start()
				}
				err = r.unpublish("v", target)
				if !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "still mounted by the sandbox") {
					t.Errorf("unpublished while a guest has it: %v", err)
				}
				must(t, guest.Close())
				must(t, r.unpublish("v", target))
				must(t, r.unstage("v"))
			})
		}
	}
}

// D06: the same with raw block volumes of pods of this node: one call each takes them away, and no device is left on the disk.
func TestD06_ARawVolumeOfADiskThatIsGoneEnds(t *testing.T) {
	for _, now := range []string{"pulled", "another disk"} {
		for _, readOnly := range []bool{false, true} {
			t.Run(fmt.Sprint(now, ", read-only=", readOnly), func(t *testing.T) {
				r := newRig(t)
				device := r.disk("disk", "true")
				node := r.node("a", device)
				must(t, r.stage("v", rawBlock(), node))
				target, err := r.publish("v", "pod", rawBlock(), readOnly, node)
				must(t, err)
				must(t, os.Remove(node))
				if now == "another disk" {
					r.node("a", r.disk("other", "true"))
				}
				if err := r.unpublish("v", target); err != nil {
					t.Error(err)
					must(t, r.unpublish("v", target))
				}
				if left := shell(t, "losetup -nO NAME,BACK-FILE | grep -F '"+node+"' || true"); readOnly && left != "" {
					t.Errorf("left after unpublish: %s", left)
				}
				must(t, r.unstage("v"))
				if left := shell(t, "losetup -nO NAME,BACK-FILE | grep -F '"+node+"' || true"); left != "" {
					t.Errorf("left: %s", left)
					shell(t, "losetup -d "+strings.Fields(left)[0])
				}
			})
		}
	}
}
