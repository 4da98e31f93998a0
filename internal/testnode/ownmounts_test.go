package testnode

import (
	"bufio"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Tests freeze file systems. One that is killed meanwhile must not leave that behind: each sync(2) of the machine would wait for ever.
func TestAKilledTestLeavesNothingFrozen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run := func(argv ...string) string {
		t.Helper()
		out, err := exec.Command(argv[0], argv[1:]...).Output()
		if err != nil {
			t.Fatalf("%v: %v", argv, err)
		}
		return string(out)
	}
	disk, at := filepath.Join(dir, "disk"), filepath.Join(dir, "at")
	run("truncate", "-s", "16M", disk)
	run("mkfs.ext4", "-q", disk)
	run("mkdir", at)
	c := exec.Command("../../scripts/own-mounts.sh", "sh", "-c", `mount "$1" "$2" && fsfreeze -f "$2" && echo frozen && exec sleep 600`, "sh", disk, at)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	said, err := bufio.NewReader(out).ReadString('\n')
	loops := func() string { return strings.TrimSpace(run("losetup", "-n", "-O", "NAME", "-j", disk)) }
	loop := loops()
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // it was killed
	if err != nil || said != "frozen\n" {
		t.Fatal(said, err)
	}
	// The loop device ends with its last mount, which a frozen one does not.
	for end := time.Now().Add(time.Minute); loops() != ""; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("%s is frozen", loop)
			run("mount", "-t", "ext4", loop, at)
			run("fsfreeze", "-u", at)
			run("umount", at)
			break
		}
	}
}
