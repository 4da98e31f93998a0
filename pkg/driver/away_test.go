package driver_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Pods that read a raw block volume keep their devices, also if csi-node started while the pool of the volume was away or not configured:
// a device that is let go gets the next volume, which is another tenant's.
func TestA05_ReadersOfAPoolThatWasAwayKeepTheirDevice(t *testing.T) {
	for _, how := range []string{"here", "away", "away for long", "not configured"} {
		t.Run(how, func(t *testing.T) {
			r := newRig(t)
			id := r.create("v", rawBlock(), 1<<20)
			must(t, r.stage(id, rawBlock()))
			writer, err := r.publish(id, "writer", rawBlock(), false)
			must(t, err)
			shell(t, "printf 'data of v' | dd of="+writer+" conv=fsync status=none")
			must(t, r.unpublish(id, writer))
			a, err := r.publish(id, "a", rawBlock(), true)
			must(t, err)
			b, err := r.publish(id, "b", rawBlock(), true)
			must(t, err)

			r.stop()
			switch how {
			case "away", "away for long":
				r.diskAway()
			case "not configured":
				r.pool = "q"
			}
			r.start()
			if how == "away" {
				r.diskBack()
			}
			if got := r.inventory()[id]; how != "away for long" && !slices.Equal(got, []string{a, b}) {
				t.Errorf("the inventory has %q", got)
			}
			must(t, r.unpublish(id, a))
			out, err := exec.Command("head", "-c", "9", b).CombinedOutput()
			if err != nil || string(out) != "data of v" {
				t.Errorf("another pod has ended, and this one reads %q, %v", out, err)
			}
			if err := r.unstage(id); err == nil || !strings.Contains(err.Error(), b) {
				t.Errorf("the volume is unstaged while a pod has it: %v", err)
			}
			if how == "away for long" {
				r.diskBack()
			}
			must(t, r.unpublish(id, b))
			must(t, r.unstage(id))
			if left := shell(t, "losetup -nO BACK-FILE | grep "+r.dir+" || true"); left != "" {
				t.Errorf("left attached: %s", left)
			}
		})
	}
}

// A device of a pool that is away belongs to nobody else: it is not formatted as a static volume.
func TestA05_ADeviceOfAPoolThatIsAwayIsNoStaticVolume(t *testing.T) {
	r := newRig(t)
	id := r.create("v", rawBlock(), 16<<20)
	must(t, r.stage(id, rawBlock()))
	target, err := r.publish(id, "pod", rawBlock(), false)
	must(t, err)
	device := shell(t, "losetup -nO NAME,BACK-FILE | awk -v d="+r.dir+"/p/ 'index($2, d) == 1 {print $1}'")
	other := r.disk("other", "mkfs.ext4 -q "+r.dir+"/other")
	for _, away := range []bool{false, true} {
		if away {
			r.diskAway()
		}
		err := r.stage("disk", fileSystem("ext4"), device)
		if err == nil {
			t.Errorf("away %t: %s is staged as another volume: %s", away, device, shell(t, "blkid -p "+device+" || true"))
			must(t, r.unstage("disk"))
		}
		want := map[bool]string{false: "belongs to the pool volume " + id, true: "is no pool, as if its disk were not mounted"}[away]
		if err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("away %t: %v", away, err)
		}
		must(t, r.stage("other", fileSystem("ext4"), other)) // a disk of nobody's
		must(t, r.unstage("other"))
	}
	r.diskBack()
	must(t, r.unpublish(id, target))
	must(t, r.unstage(id))
	if _, err := os.Stat(target); !os.IsNotExist(err) {
		t.Error(err)
	}
}

// A stage that is refused makes csi-node forget no pod: each of them keeps its device until it ends.
func TestA05_ARefusedStageForgetsNoReader(t *testing.T) {
	r := newRig(t)
	id := r.create("v", rawBlock(), 1<<20)
	must(t, r.stage(id, rawBlock()))
	a, err := r.publish(id, "a", rawBlock(), true)
	must(t, err)
	b, err := r.publish(id, "b", rawBlock(), true)
	must(t, err)
	r.stop()
	r.spoil("state/staged", "newer")
	r.start()
	if err := r.stage(id, rawBlock()); err == nil {
		t.Error("it is staged")
	}
	must(t, r.unpublish(id, a))
	if out, err := exec.Command("head", "-c", "1", b).CombinedOutput(); err != nil || len(out) != 1 {
		t.Errorf("another pod has ended, and this one reads %q, %v", out, err)
	}
	if got := r.inventory()[id]; !slices.Equal(got, []string{b}) {
		t.Errorf("the inventory has %q", got)
	}
	must(t, r.unpublish(id, b))
	must(t, r.unstage(id))
}
