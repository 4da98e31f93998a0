package driver_test

import (
	"os"
	"testing"
)

// A07: a loop device that an administrator made on a static volume's device is his: no call takes it away, though nobody has it open.
func TestA07_ALoopDeviceOfTheAdministratorsStays(t *testing.T) {
	for name, args := range map[string]string{"writable": "", "read-only": "-r"} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			device := r.disk("disk", "true")
			must(t, r.stage("v", rawBlock(), device))
			target, err := r.publish("v", "pod", rawBlock(), true, device)
			must(t, err)
			his := shell(t, "losetup -f --show "+args+" "+device)
			t.Cleanup(func() { shell(t, "! losetup "+his+" >/dev/null 2>&1 || losetup -d "+his) })
			stays := func(after string) {
				t.Helper()
				if _, err := os.Stat("/sys/block/" + his[len("/dev/"):] + "/loop"); err != nil {
					t.Errorf("%s is gone after %s", his, after)
				}
			}
			must(t, r.unpublish("v", target))
			stays("unpublish")
			must(t, r.unstage("v"))
			stays("unstage")
			if left := shell(t, "losetup -nO NAME,BACK-FILE | awk '$2 == \""+device+"\" && $1 != \""+his+"\"'"); left != "" {
				t.Errorf("left: %s", left)
			}
		})
	}
}
