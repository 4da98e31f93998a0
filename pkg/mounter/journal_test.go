package mounter_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// R05: pods that only read get a device that takes no writes. If the file system was not unmounted cleanly, the error says what to do.
func TestR05_AJournalThatCannotBeWritten(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			dir := t.TempDir()
			out, err := exec.Command("sh", "-ec", `cd "$1"; truncate -s 400M a; mkfs.$2 -q a; mkdir m; mount -o loop a m
				echo x >m/f; sync -f m; echo y >m/g; sync m/g; cp --sparse=always a b; umount m; losetup -r -f --show b`,
				"sh", dir, fs).Output()
			if err != nil {
				t.Fatal(err)
			}
			device := strings.TrimSpace(string(out))
			defer func() { _ = exec.Command("losetup", "-d", device).Run() }()
			d, err := mounter.FindDevice(device)
			if err != nil {
				t.Fatal(err)
			}
			m, err := mounter.Open(mounter.Filesystem{Device: d, Type: fs, ReadOnly: true})
			if err == nil {
				m.Close()
				t.Fatal("it is mounted")
			}
			if !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "start a pod once that may write to the volume") ||
				strings.Contains(err.Error(), "publish the volume read-only") {
				t.Error(err)
			}
		})
	}
}
