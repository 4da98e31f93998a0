package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// disk makes a sparse file of that many bytes and a loop device over it.
func disk(t testing.TB, bytes int64) (file, dev string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(file, nil, 0o600))
	ok(t, os.Truncate(file, bytes))
	return file, loop(t, file)
}

// loop makes a loop device over a file or another device.
func loop(t testing.TB, over string, args ...string) string {
	t.Helper()
	dev := strings.TrimSpace(run(t, "losetup", append(append([]string{"-f", "--show"}, args...), over)...))
	t.Cleanup(func() { run(t, "losetup", "-d", dev) })
	return dev
}

func static(id, dev, fstype string) csiclient.Volume {
	return csiclient.Volume{ID: id, FSType: fstype, Block: fstype == "", Context: map[string]string{"device": dev}}
}

// staticRecord returns the file of a static volume's record.
func staticRecord(n *testnode.Node, id string) string {
	sum := sha256.Sum256([]byte(id))
	return filepath.Join(n.Dir, "state/static", hex.EncodeToString(sum[:16])+".json")
}

// format adds the administrator's word.
func format(v csiclient.Volume, word string) csiclient.Volume {
	v.Context = map[string]string{"device": v.Context["device"], "format": word}
	return v
}

// stagePatiently repeats a stage until it is neither running nor out of time.
func stagePatiently(t testing.TB, n *testnode.Node, v csiclient.Volume) error {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		err := n.Client.Stage(ctx, v)
		cancel()
		if c := status.Code(err); c != codes.Aborted && c != codes.DeadlineExceeded || time.Now().After(deadline) {
			return err
		}
	}
}

// A02: the original finding: 52 MiB of data at 226 MiB of a device of 10 GiB.
func TestA02_DataInTheMiddleIsNeverFormatted(t *testing.T) {
	t.Parallel()
	const middle, length = 226 << 20, 52 << 20
	data := bytes.Repeat([]byte("data"), length/4)
	for name, over := range map[string]func(dev string) string{
		"a loop device over a sparse file": func(dev string) string { return dev },
		// The second device shows no holes, so every byte of it is read.
		"a device without holes": func(dev string) string { return loop(t, dev) },
	} {
		t.Run(name, func(t *testing.T) {
			file, dev := disk(t, 10<<30)
			dev = over(dev)
			patch(t, file, middle, data)
			n := testnode.New(t, "", "--allow-device", dev)
			before := used(t, file)
			refused(t, stagePatiently(t, n, static("disk", dev, "ext4")), codes.FailedPrecondition, "disk", dev,
				fmt.Sprint(middle), "wipefs")
			if used(t, file) != before {
				t.Error("the device was written to")
			}
			f, err := os.Open(file)
			ok(t, err)
			defer f.Close()
			got := make([]byte, length)
			_, err = f.ReadAt(got, middle)
			ok(t, err)
			if !bytes.Equal(got, data) {
				t.Error("the data changed")
			}
		})
	}
}

func used(t testing.TB, file string) string { return run(t, "stat", "-c", "%b %y", file) }

func TestA02_ABlankDeviceIsFormattedOnce(t *testing.T) {
	t.Parallel()
	_, dev := disk(t, size)
	n := testnode.New(t, "", "--allow-device", dev)
	v := static("disk", dev, "ext4")
	ok(t, stagePatiently(t, n, v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	write(t, n.Target("a")+"/f", "kept")
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	// Under another id it is the same disk.
	other := static("other", dev, "ext4")
	ok(t, stagePatiently(t, n, other))
	ok(t, n.Client.Publish(ctxOf(t), other, n.Target("a"), false))
	if got := read(t, n.Target("a")+"/f"); got != "kept" {
		t.Errorf("read %q", got)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), other.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), other.ID))
	// A disk that was wiped since is not formatted again, under whatever id.
	run(t, "blkdiscard", "-z", dev)
	for _, id := range []string{"other", "third"} {
		refused(t, stagePatiently(t, n, static(id, dev, "ext4")), codes.FailedPrecondition, "formatted", "mkfs.ext4")
	}
	// The solution that the error names.
	run(t, "mkfs.ext4", "-q", dev)
	ok(t, stagePatiently(t, n, v))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// A02: the former use of a device belongs to the device, not to an id that somebody chose.
func TestA02_RawUnderOneIDIsNotFormattedUnderAnother(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]func(t *testing.T, file, dev string) string{
		"the same device":                     func(_ *testing.T, _, dev string) string { return dev },
		"another device over the same file":   func(t *testing.T, file, _ string) string { return loop(t, file) },
		"a part of it":                        func(t *testing.T, file, _ string) string { return loop(t, file, "-o", "16777216") },
		"another device on top of the device": func(t *testing.T, _, dev string) string { return loop(t, dev) },
	} {
		t.Run(name, func(t *testing.T) {
			file, dev := disk(t, size)
			n := testnode.New(t, "", "--allow-device", "/dev/loop*")
			raw := static("raw", dev, "")
			ok(t, n.Client.Stage(ctxOf(t), raw))
			ok(t, n.Client.Publish(ctxOf(t), raw, n.Target("raw"), false))
			ok(t, n.Client.Unpublish(ctxOf(t), raw.ID, n.Target("raw")))
			ok(t, n.Client.Unstage(ctxOf(t), raw.ID))
			n.Restart()
			dev = again(t, file, dev)
			before := used(t, file)
			for _, v := range []csiclient.Volume{static("files", dev, "ext4"), format(static("said", dev, "ext4"), "IfProbedBlank")} {
				refused(t, stagePatiently(t, n, v), codes.FailedPrecondition, "raw block device", "volume raw", "mkfs.ext4")
			}
			if used(t, file) != before {
				t.Error("the device was written to")
			}
		})
	}
}

// A02: a record of an earlier version has no identity. It gets one when the device is found.
func TestA02_ARecordOfVersion1IsRead(t *testing.T) {
	t.Parallel()
	_, dev := disk(t, size)
	n := testnode.NewStopped(t, "", "--allow-device", dev)
	ok(t, os.MkdirAll(filepath.Dir(staticRecord(n, "raw")), 0o700))
	// As the first version wrote it.
	write(t, staticRecord(n, "raw"), `{
  "kind": "crust-csi.static-volume", "version": 1,
  "data": {"volume": {"id": "raw", "sizeBytes": 0, "created": "2026-01-02T03:04:05Z", "facts": {"givenRaw": true}}, "device": "`+dev+`"}
}`)
	n.Begin()
	// Until it is found under its own id, nobody can know that it is another.
	refused(t, stagePatiently(t, n, static("files", dev, "ext4")), codes.FailedPrecondition, "raw block device", "volume raw")
	raw := static("raw", dev, "")
	ok(t, n.Client.Stage(ctxOf(t), raw))
	ok(t, n.Client.Unstage(ctxOf(t), raw.ID))
	n.Restart()
	refused(t, stagePatiently(t, n, static("again", dev, "ext4")), codes.FailedPrecondition, "raw block device", "volume raw")
}

// A02: an unreadable record does not count as none.
func TestA02_ABadRecordOfADeviceForbidsToFormatIt(t *testing.T) {
	t.Parallel()
	file, dev := disk(t, size)
	n := testnode.New(t, "", "--allow-device", dev)
	raw := static("raw", dev, "")
	ok(t, n.Client.Stage(ctxOf(t), raw))
	ok(t, n.Client.Unstage(ctxOf(t), raw.ID))
	n.Stop()
	bad := stateFile(t, n, "static/devices")
	spoil(t, bad, spoilt["garbage"])
	kept := read(t, bad)
	n.Start()
	said(t, n, bad)
	before := used(t, file)
	refused(t, stagePatiently(t, n, format(static("files", dev, "ext4"), "IfProbedBlank")), codes.FailedPrecondition, "not formatted", bad)
	if used(t, file) != before || read(t, bad) != kept {
		t.Error("the device or its record was written to")
	}
	run(t, "mkfs.ext4", "-q", dev)
	ok(t, n.Client.Stage(ctxOf(t), static("files", dev, "ext4")))
	ok(t, n.Client.Unstage(ctxOf(t), "files"))
}

// A02: with the administrator's word the probe is enough.
func TestA02_TheAdministratorsWord(t *testing.T) {
	t.Parallel()
	file, dev := disk(t, size)
	patch(t, file, 226<<20, []byte("worth nothing"))
	n := testnode.New(t, "", "--allow-device", dev)
	v := static("disk", dev, "ext4")
	refused(t, stagePatiently(t, n, v), codes.FailedPrecondition, "IfProbedBlank")
	refused(t, n.Client.Stage(ctxOf(t), format(v, "Always")), codes.InvalidArgument, "Always", "IfProbedBlank")
	ok(t, stagePatiently(t, n, format(v, "IfProbedBlank")))
	if got := read(t, staticRecord(n, v.ID)); !strings.Contains(got, "IfProbedBlank") {
		t.Errorf("the word is not in the volume's record:\n%s", got)
	}
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	// The word has no effect on what was found.
	patch(t, file, 0, make([]byte, 8<<20))
	patch(t, file, 4096, []byte("garbage"))
	w := format(static("another", dev, "ext4"), "IfProbedBlank")
	refused(t, stagePatiently(t, n, w), codes.FailedPrecondition, "unknown data")
}

// underWay starts a stage, abandons it, and waits until some of the device has been read.
func underWay(t testing.TB, n *testnode.Node, v csiclient.Volume) {
	t.Helper()
	leave(t, func(ctx context.Context) error { return n.Client.Stage(ctx, v) })
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		err := n.Client.Stage(ctxOf(t), v)
		refused(t, err, codes.Aborted, "NodeStageVolume is running")
		if someOf.MatchString(err.Error()) {
			return
		}
		if t.Failed() || time.Now().After(deadline) {
			t.Fatalf("no progress is told: %v", err)
		}
	}
}

var (
	someOf = regexp.MustCompile(`[1-9][0-9]*% of [0-9.]+ GiB is proven blank`)
	goesOn = regexp.MustCompile(`goes on where.*from=([0-9]+)`)
)

// A02: the full read survives its caller and the driver, and restarts if somebody wrote meanwhile.
func TestA02_TheFullReadOutlivesCallersAndKills(t *testing.T) {
	t.Parallel()
	file, below := disk(t, 1<<30)
	dev := loop(t, below) // shows no holes
	n := testnode.NewStopped(t, "failpoint", "--allow-device", dev)
	slowly := []string{"CRUST_FAILPOINT_PAUSE=blank.read"} // sleeps a second after each 64 MiB
	n.Env = slowly
	n.Begin()
	v := static("disk", dev, "ext4")
	underWay(t, n, v)
	// Nobody mounts it or makes a file system on it meanwhile.
	if f, err := os.OpenFile(dev, os.O_RDONLY|syscall.O_EXCL, 0); err == nil {
		f.Close()
		t.Error("the device is not held while it is read")
	}
	n.Kill()
	n.Start()
	underWay(t, n, v)
	said(t, n, "goes on where")
	if from := goesOn.FindStringSubmatch(n.Log()); from == nil || from[1] == "0" {
		t.Fatalf("the read began anew: %v", from)
	}
	// A write to a part that was read, while nobody watches.
	n.Kill()
	patch(t, dev, 37<<20+512, []byte("written meanwhile"))
	n.Env = nil
	n.Start()
	before := used(t, file)
	refused(t, stagePatiently(t, n, v), codes.FailedPrecondition, fmt.Sprint(37<<20+512))
	if goesOn.MatchString(n.Log()) {
		t.Error("the read went on, though somebody had written")
	}
	if used(t, file) != before {
		t.Error("the device was written to")
	}
	// The driver is stopped in the middle, and started again.
	patch(t, dev, 37<<20+512, make([]byte, 64))
	n.Kill()
	n.Env = slowly
	n.Start()
	underWay(t, n, v)
	n.Stop()
	n.Env = nil
	n.Start()
	ok(t, stagePatiently(t, n, v))
	said(t, n, "goes on where")
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// A02: O_EXCL prevents mounts, but not plain writes. The kernel counts those.
func TestA02_AWriteToAPartThatWasReadIsFoundOut(t *testing.T) {
	t.Parallel()
	_, below := disk(t, 128<<20)
	dev := loop(t, below)
	n := testnode.NewStopped(t, "failpoint", "--allow-device", dev)
	n.Env = []string{"CRUST_FAILPOINT_PAUSE=blank.read"}
	n.Begin()
	v := static("disk", dev, "ext4")
	underWay(t, n, v)
	patch(t, dev, 5<<20+512, []byte("written meanwhile"))
	said(t, n, "somebody wrote to the device while it was being read")
	refused(t, stagePatiently(t, n, v), codes.FailedPrecondition, fmt.Sprint(5<<20+512))
}

// A02: somebody may write between the proof and mkfs, and the driver may be killed there.
func TestA02_AWriteJustBeforeMkfsIsFoundOut(t *testing.T) {
	t.Parallel()
	for killed, want := range map[bool]string{false: "holds unknown data", true: "was begun and did not end"} {
		t.Run(fmt.Sprintf("killed=%t", killed), func(t *testing.T) {
			_, dev := disk(t, size)
			n, points := testnode.NewStopped(t, "failpoint", "--allow-device", dev), testnode.NewFailpoints(t)
			n.Env = points.Env()
			n.Begin()
			v := static("disk", dev, "ext4")
			hung, done := points.Hang(t, "format.intended", func() error { return n.Client.Stage(ctxOf(t), v) })
			if !hung {
				t.Fatalf("no format was begun: %v", <-done)
			}
			run(t, "grep", "-rq", "formatting", filepath.Join(n.Dir, "state/static"))
			patch(t, dev, 8192, []byte("written meanwhile"))
			if killed {
				n.Kill()
				<-done
			}
			points.Off(t)
			if killed {
				n.Start()
			} else {
				refused(t, <-done, codes.FailedPrecondition, "somebody wrote to it just now")
			}
			refused(t, stagePatiently(t, n, v), codes.FailedPrecondition, v.ID, want)
			got := make([]byte, 7)
			f, err := os.Open(dev)
			ok(t, err)
			defer f.Close()
			_, err = f.ReadAt(got, 8192)
			ok(t, err)
			if string(got) != "written" {
				t.Errorf("the data is %q", got)
			}
		})
	}
}
