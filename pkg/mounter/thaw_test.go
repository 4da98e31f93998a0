package mounter

import (
	"os/exec"
	"testing"
)

// D06: a file system that became read-only, as the kernel makes one after an error, is frozen and thawed like any other. The kernel
// refuses a further mount of such a superblock that may write.
func TestD06_AReadOnlySuperblockIsThawed(t *testing.T) {
	for _, name := range filesystems {
		t.Run(name, func(t *testing.T) {
			dev := formatted(t, name)
			at := t.TempDir()
			run := func(argv ...string) {
				t.Helper()
				if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
					t.Fatalf("%v: %v\n%s", argv, err, out)
				}
			}
			run("mount", "-t", name, dev.Path, at)
			t.Cleanup(func() { run("umount", at) })
			run("mount", "-o", "remount,ro", at)
			fs := Filesystem{Device: dev, Type: name}
			thaw, err := Freeze(fs)
			check(t, err)
			check(t, thaw())
			run("fsfreeze", "--freeze", at)
			check(t, Thaw(fs))
			if exec.Command("fsfreeze", "--unfreeze", at).Run() == nil {
				t.Error("it was frozen still")
			}
			check(t, Thaw(fs)) // once more is fine
		})
	}
}
