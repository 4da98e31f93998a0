package node

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

func errorState(t *testing.T, img string) { run(t, "debugfs", "-w", "-R", "ssv state 2", img) }

// noRoot clears the root directory's inode: e2fsck -p leaves that to people, after it has written
// to the superblock.
func noRoot(t *testing.T, img string) {
	run(t, "debugfs", "-w", "-R", "clri <2>", img)
	errorState(t, img)
}

// needsRepair marks an xfs as xfs_repair does while it works.
func needsRepair(t *testing.T, img string) {
	f, err := os.Open(img)
	ok(t, err)
	defer f.Close()
	sb := make([]byte, 512)
	_, err = f.ReadAt(sb, 0)
	ok(t, err)
	binary.BigEndian.PutUint32(sb[216:], binary.BigEndian.Uint32(sb[216:])|0x10)
	copy(sb[224:228], make([]byte, 4))
	binary.LittleEndian.PutUint32(sb[224:], crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli)))
	patch(t, img, 0, sb)
}

// spoiled formats a volume and damages it while it is not staged.
func spoiled(t *testing.T, n *testnode.Node, name, fstype string, spoil func(t *testing.T, img string)) csiclient.Volume {
	v := create(t, n, name, csiclient.Volume{FSType: fstype})
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	spoil(t, image(n, v.ID))
	return v
}

func wantOutcome(t *testing.T, n *testnode.Node, id, want string) {
	t.Helper()
	line := regexp.MustCompile(`file system check.*volume_id=` + regexp.QuoteMeta(id) + `.*outcome=` + want + ` `)
	// The log comes through a pipe, the answer through a socket.
	for deadline := time.Now().Add(time.Minute); !line.MatchString(n.Log()); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the log does not tell that the check of %s ended with %s", id, want)
		}
	}
}

// loopDevice returns the loop device of a volume's file.
func loopDevice(t *testing.T, img string) string {
	t.Helper()
	return strings.TrimSpace(run(t, "losetup", "-n", "-O", "NAME", "-j", img))
}

const checks = `crust_filesystem_checks_total{outcome="`

func TestD08_ThreeOutcomesOfACheck(t *testing.T) {
	t.Parallel()
	n, metrics := withMetrics(t)
	// A mark of an unclean end is cleared, which e2fsck counts as a repair. Only a file system
	// without such a mark can have a clean outcome, and stage never checks one.
	v := spoiled(t, n, "unclean", "ext4", func(t *testing.T, img string) { run(t, "debugfs", "-w", "-R", "ssv state 0", img) })
	ok(t, n.Client.Stage(ctxOf(t), v))
	wantOutcome(t, n, v.ID, "repaired")
	down(t, n, v.ID)
	v = spoiled(t, n, "repaired", "ext4", func(t *testing.T, img string) {
		errorState(t, img)
		run(t, "debugfs", "-w", "-R", "ssv free_blocks_count 1", img)
	})
	ok(t, n.Client.Stage(ctxOf(t), v))
	wantOutcome(t, n, v.ID, "repaired")
	run(t, "e2fsck", "-f", "-n", image(n, v.ID))
	down(t, n, v.ID)
	v = spoiled(t, n, "human", "ext4", noRoot)
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "needs a person", "e2fsck -n")
	wantOutcome(t, n, v.ID, "needs-human")
	down(t, n, v.ID)
	m := metrics()
	wantMetric(t, m, checks+`repaired"}`, "2")
	wantMetric(t, m, checks+`needs-human"}`, "1")
	wantMetric(t, m, checks+`clean"}`, "0")
}

// D08: damage that needs a person is left unchanged, however often the orchestrator tries, and is
// not checked again needlessly.
func TestD08_NeedsAPersonChangesNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		fstype, program, advice string
		spoil, mend             func(t *testing.T, img string)
	}{
		{"ext4", "e2fsck", "e2fsck -n", noRoot,
			func(t *testing.T, img string) { run(t, "sh", "-c", `e2fsck -f -y "$0"; [ $? = 1 ]`, img) }},
		{"xfs", "xfs_repair", "xfs_repair -n", needsRepair, func(t *testing.T, img string) { run(t, "xfs_repair", img) }},
	} {
		if !slices.Contains(filesystems, c.fstype) {
			continue // only the guests' kernels have it
		}
		t.Run(c.fstype, func(t *testing.T) {
			n, metrics := withMetrics(t)
			v := spoiled(t, n, "a", c.fstype, c.spoil)
			before := sum(t, image(n, v.ID))
			untouched := func(after string) {
				t.Helper()
				if sum(t, image(n, v.ID)) != before {
					t.Fatalf("%s, the device has changed", after)
				}
			}
			ran := func(checked string) {
				t.Helper()
				m := metrics()
				wantMetric(t, m, checks+`needs-human"}`, checked)
				wantMetric(t, m, `crust_programs_started_total{program="`+c.program+`"}`, checked)
			}
			for _, attempt := range []string{"after the first attempt", "after the second", "after the third"} {
				refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID, "needs a person", c.advice)
				untouched(attempt)
				ran("1")
			}
			// Somebody else may have changed it meanwhile.
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
			refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "needs a person")
			untouched("after an unstage")
			ran("2")
			n.Restart()
			refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "needs a person")
			untouched("after a restart")
			ran("1")
			// A person repairs it, on the device that the failed stage left attached.
			c.mend(t, loopDevice(t, image(n, v.ID)))
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
			down(t, n, v.ID, n.Target("a"))
		})
	}
}

// D08: a check that finds nothing does not make a marked xfs mountable.
func TestD08_AMarkThatStaysNeedsAPerson(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := spoiled(t, n, "a", "xfs", needsRepair)
	withPrograms(t, n, map[string]string{"xfs_repair": "exit 0"})
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "needs a person", "mark is still there")
	wantOutcome(t, n, v.ID, "needs-human")
	down(t, n, v.ID)
}

// D08: a repair that a person only began is checked again.
func TestD08_AChangedDeviceIsCheckedAgain(t *testing.T) {
	t.Parallel()
	n, metrics := withMetrics(t)
	v := spoiled(t, n, "a", "ext4", noRoot)
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "needs a person")
	run(t, "debugfs", "-w", "-R", "ssv volume_name other", loopDevice(t, image(n, v.ID)))
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, "needs a person")
	wantMetric(t, metrics(), checks+`needs-human"}`, "2")
	down(t, n, v.ID)
}

// D08: without room for the copy that the repair is tried on, nothing is tried.
func TestD08_NoRoomToLookFirst(t *testing.T) {
	t.Parallel()
	img := filepath.Join(t.TempDir(), "img")
	ok(t, os.WriteFile(img, nil, 0o600))
	ok(t, os.Truncate(img, 64<<20))
	run(t, "mkfs.ext4", "-q", img)
	noRoot(t, img)
	before := sum(t, img)
	small := t.TempDir()
	run(t, "mount", "-t", "tmpfs", "-o", "size=64k", "small", small)
	defer testnode.Unmount(t, small)
	p := fsprogs.New(nil)
	p.Scratch = small
	_, _, err := p.Check(ctxOf(t), img, "ext4")
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte(small)) {
		t.Errorf("without room: %v", err)
	}
	if left, err := os.ReadDir(small); err != nil || len(left) > 0 {
		t.Errorf("left in the scratch directory: %v %v", left, err)
	}
	if sum(t, img) != before {
		t.Error("the image changed")
	}
}

// damages make an image of each file system one that needs a person.
var damages = map[string]func(*testing.T, string){
	"ext4": noRoot,
	"xfs": func(t *testing.T, img string) {
		patch(t, img, 2*512, bytes.Repeat([]byte{0xff}, 512)) // the header of the first group's inodes (AGI)
	},
	"btrfs": func(t *testing.T, img string) {
		// Both copies of its trees; the superblocks at 64 KiB and 64 MiB stay.
		patch(t, img, 20<<20, bytes.Repeat([]byte{0xff}, 43<<20))
		patch(t, img, 65<<20, bytes.Repeat([]byte{0xff}, 100<<20))
	},
	"f2fs": func(t *testing.T, img string) {
		// The first blocks of the main area have the node of the root directory (f2fs.h: main_blkaddr of the superblock).
		b, err := os.ReadFile(img)
		ok(t, err)
		const block = 4096
		at := int64(binary.LittleEndian.Uint32(b[1024+92:])) * block
		patch(t, img, at, bytes.Repeat([]byte{0xff}, block))
	},
}

// D08: the check itself, for each file system, clean and damaged. (Nothing requests a check of a
// btrfs before its mount.) The kernel has no part in it.
func TestD08_CheckOfEachFileSystem(t *testing.T) {
	t.Parallel()
	for _, name := range fstype.Formats() {
		t.Run(name, func(t *testing.T) {
			img := filepath.Join(t.TempDir(), "img")
			ok(t, os.WriteFile(img, nil, 0o600))
			ok(t, os.Truncate(img, size))
			run(t, "mkfs."+name, "-q", img)
			p := fsprogs.New(nil)
			check := func(want fsprogs.Outcome) {
				t.Helper()
				before := sum(t, img)
				got, said, err := p.Check(ctxOf(t), img, name)
				ok(t, err)
				if got != want {
					t.Errorf("want %v, got %v: %s", want, got, said)
				}
				if got == fsprogs.NeedsHuman && sum(t, img) != before {
					t.Error("the check changed the image")
				}
			}
			check(fsprogs.Clean)
			if damages[name] == nil {
				t.Fatalf("nothing damages %s", name)
			}
			damages[name](t, img)
			check(fsprogs.NeedsHuman)
			if row := fstype.Of(name); len(row.Resize) > 0 {
				if row.CopyMetadata != nil {
					run(t, "debugfs", "-w", "-R", "ssv state 1", img) // unmounted cleanly: only a full check looks
				}
				before := sum(t, img)
				dev := strings.TrimSpace(run(t, "losetup", "-f", "--show", img))
				defer run(t, "losetup", "-d", dev)
				if err := p.Grow(ctxOf(t), dev, name); err == nil || !strings.Contains(err.Error(), "needs a person") {
					t.Errorf("a damaged %s was grown: %v", name, err)
				}
				if sum(t, img) != before {
					t.Error("a growth that was refused changed the image")
				}
			}
		})
	}
}

// D08: an xfs or btrfs that was not unmounted has a log, which the kernel replays. Nothing is
// checked, and nothing is lost.
func TestD08_ALogToReplayIsNoDamage(t *testing.T) {
	t.Parallel()
	n, metrics := withMetrics(t)
	for _, fstype := range filesystems {
		v, target := up(t, n, fstype, csiclient.Volume{FSType: fstype})
		f, err := os.Create(target + "/f")
		ok(t, err)
		_, err = f.WriteString("synced")
		ok(t, err)
		ok(t, f.Sync())
		ok(t, f.Close())
		crashed := create(t, n, fstype+"-crashed", csiclient.Volume{FSType: fstype})
		ok(t, n.Client.Stage(ctxOf(t), crashed))
		ok(t, n.Client.Unstage(ctxOf(t), crashed.ID))
		dev := loopDevice(t, image(n, v.ID))
		run(t, "dd", "if="+dev, "of="+image(n, crashed.ID), "bs=1M", "conv=sparse,notrunc", "iflag=direct", "status=none")
		down(t, n, v.ID, target)
		ok(t, n.Client.Stage(ctxOf(t), crashed))
		ok(t, n.Client.Publish(ctxOf(t), crashed, target, false))
		if got := read(t, target+"/f"); got != "synced" {
			t.Errorf("%s: read %q", fstype, got)
		}
		down(t, n, crashed.ID, target)
	}
	m := metrics()
	for _, outcome := range []string{"clean", "repaired", "needs-human"} {
		wantMetric(t, m, checks+outcome+`"}`, "0")
	}
}

// D06, D08: a check works on a copy of the metadata. If the driver is killed meanwhile, its next
// start removes the copy.
func TestD06_D08_ACheckThatWasKilledLeavesNoCopy(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := spoiled(t, n, "killed", "ext4", errorState)
	withPrograms(t, n, map[string]string{"e2image": "sleep 3600"})
	copies := func() []string {
		found, err := filepath.Glob(filepath.Join(n.Dir, "state", "check-*"))
		ok(t, err)
		return found
	}
	ended := make(chan error, 1)
	go func() { ended <- n.Client.Stage(ctxOf(t), v) }()
	for len(copies()) == 0 && len(ended) == 0 {
		time.Sleep(time.Millisecond)
	}
	n.Kill()
	if err := <-ended; err == nil {
		t.Fatal("the stage did not wait for the check")
	}
	if len(copies()) != 1 {
		t.Fatalf("copies: %v", copies())
	}
	n.Env = nil
	n.Start()
	if left := copies(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	ok(t, n.Client.Stage(ctxOf(t), v))
	down(t, n, v.ID)
}

// dueToGrow returns an ext4 that resize2fs grows at its next stage, because csi-node has no CAP_SYS_RESOURCE.
func dueToGrow(t *testing.T) (*testnode.Node, csiclient.Volume) {
	t.Helper()
	n := testnode.New(t, "", "--capabilities", "CHOWN,DAC_OVERRIDE,FOWNER,FSETID,MKNOD,SETFCAP,SETGID,SETUID,SYS_ADMIN,SYS_CHROOT,SYS_PTRACE")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	_, err := n.Client.Expand(ctxOf(t), v.ID, 2*size, "")
	ok(t, err)
	return n, v
}

// D08: a program that exits with 0 although it refused has grown nothing. The growth stays due, and keeps no pod from starting: its files
// are all there.
func TestD08_AGrowthThatDidNothingStaysDue(t *testing.T) {
	t.Parallel()
	n, v := dueToGrow(t)
	withPrograms(t, n, map[string]string{"resize2fs": "exit 0"})
	for range 2 {
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
		if got := statfs(t, n.Target("a")); got > size {
			t.Errorf("the pod has %d bytes", got)
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
	for _, words := range []string{"a volume has not its new size yet", "resize2fs", "it did not grow", "e2fsck -n"} {
		said(t, n, words)
	}
	n.Env = nil
	n.Restart()
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	if got := statfs(t, n.Target("a")); got < size+size/2 {
		t.Errorf("the pod has %d bytes", got)
	}
	down(t, n, v.ID, n.Target("a"))
}

// D08: a program that breaks off may have left half of a growth. What it left is checked before a pod gets it.
func TestD08_AGrowthThatBreaksOffIsLeftToAPerson(t *testing.T) {
	t.Parallel()
	n, v := dueToGrow(t)
	withPrograms(t, n, map[string]string{"resize2fs": `for dev; do :; done; debugfs -w -R "clri <2>" "$dev"; exit 1`})
	refused(t, n.Client.Stage(ctxOf(t), v), codes.FailedPrecondition, v.ID, "resize2fs", "needs a person")
	down(t, n, v.ID)
}
