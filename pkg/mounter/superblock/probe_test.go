package superblock

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

func blankImage(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

func patch(t testing.TB, path string, off int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(data, off); err != nil {
		t.Fatal(err)
	}
}

func probeFile(t testing.TB, path string) Result {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	r, err := Probe(f, st.Size())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mkfs(t testing.TB, path string, argv ...string) {
	t.Helper()
	if out, err := exec.Command(argv[0], append(argv[1:], path)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
}

const testSize = 320 << 20

var makers = map[string][]string{
	"ext2": {"mke2fs", "-q", "-F", "-t", "ext2"}, "ext3": {"mke2fs", "-q", "-F", "-t", "ext3"}, "ext4": {"mkfs.ext4", "-q", "-F"},
	"xfs": {"mkfs.xfs", "-q"}, "btrfs": {"mkfs.btrfs", "-q"},
	"f2fs": {"mkfs.f2fs", "-q", "-O", "extra_attr,sb_checksum"}, "swap": {"mkswap", "-q"}, "vfat": {"mkfs.vfat"},
}

func TestD01_RealFormatsAreKnown(t *testing.T) {
	for name, argv := range makers {
		path := blankImage(t, testSize)
		mkfs(t, path, argv...)
		r := probeFile(t, path)
		if r.Content != Known || r.Type != name || r.NeedsCheck != "" {
			t.Errorf("%s: %+v", name, r)
		}
		if len(fstype.Of(name).Make) > 0 {
			if r.Size < testSize*9/10 || r.Size > testSize || r.UUID == "" || r.BlockSize < 1024 {
				t.Errorf("%s: %+v", name, r)
			}
		}
	}
}

func TestD01_MarksOfOtherFormatsAreKnown(t *testing.T) {
	for name, m := range map[string]mark{
		"luks": {0, "LUKS\xba\xbe"}, "lvm2": {512, "LABELONE"}, "md": {4096, "\xfc\x4e\x2b\xa9"}, "gpt": {512, "EFI PART"},
		"zfs":    {128 << 10, "\x0c\xb1\xba\x00\x00\x00\x00\x00"},
		"bcache": {4120, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
		"ntfs3":  {3, "NTFS    "}, "exfat": {3, "EXFAT   "}, "ceph_bluestore": {0, "bluestore block device"}, "squashfs": {0, "hsqs"},
	} {
		path := blankImage(t, testSize)
		patch(t, path, m.off, []byte(m.magic))
		if r := probeFile(t, path); r.Content != Known || r.Type != name {
			t.Errorf("%s: %+v", name, r)
		}
	}
	for off, where := range map[int64]string{testSize&^65535 - 65536: "0.90", (testSize/512 - 16) &^ 7 * 512: "1.0", 0: "1.1"} {
		path := blankImage(t, testSize)
		patch(t, path, off, []byte("\xfc\x4e\x2b\xa9"))
		if r := probeFile(t, path); r.Type != "md" {
			t.Errorf("md %s: %+v", where, r)
		}
	}
}

func TestD01_BlankIsBlank(t *testing.T) {
	for _, size := range []int64{512, 4096, 1 << 20, testSize, 1 << 40} {
		if r := probeFile2(t, size); r.Content != Blank {
			t.Errorf("%d bytes: %+v", size, r)
		}
	}
}

type zeros struct{}

func (zeros) ReadAt(b []byte, _ int64) (int, error) { clear(b); return len(b), nil }

func probeFile2(t testing.TB, size int64) Result {
	r, err := Probe(zeros{}, size)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// flips are bytes that a checksum protects.
var flips = map[string]int64{"ext4": 1024 + 0x78, "xfs": 108, "btrfs": 65536 + 299, "f2fs": 1024 + 124}

// What can be made is in each table of these tests.
func TestD01_EachFormatThatCanBeMadeIsInTheTables(t *testing.T) {
	for _, name := range fstype.Formats() {
		if makers[name] == nil {
			t.Errorf("%s: makers lacks it", name)
		}
		if flips[name] == 0 {
			t.Errorf("%s: flips lacks it", name)
		}
		if !slices.ContainsFunc(originals, func(o original) bool { return o.name == name && o.to > 0 }) {
			t.Errorf("%s: originals lacks what its checksum protects", name)
		}
	}
}

func TestD01_DamagedIsUnknownAndNeverBlank(t *testing.T) {
	for name, off := range flips {
		path := blankImage(t, testSize)
		mkfs(t, path, makers[name]...)
		patch(t, path, off, []byte("flipped"))
		if r := probeFile(t, path); r.Content != Unknown || !strings.Contains(r.Detail, "checksum") {
			t.Errorf("%s with a flipped byte: %+v", name, r)
		}
		path = blankImage(t, testSize)
		mkfs(t, path, makers[name]...)
		patch(t, path, 0, make([]byte, 1<<20))
		if r := probeFile(t, path); r.Content != Unknown || !strings.Contains(r.Detail, "data at offset") {
			t.Errorf("%s without its first MiB: %+v", name, r)
		}
	}
	path := blankImage(t, testSize)
	patch(t, path, testSize-1, []byte{1})
	if r := probeFile(t, path); r.Content != Unknown {
		t.Errorf("a last byte: %+v", r)
	}
	path = blankImage(t, testSize)
	mkfs(t, path, makers["ext4"]...)
	patch(t, path, 512, []byte("LABELONE"))
	if r := probeFile(t, path); r.Content != Unknown || !strings.Contains(r.Detail, "more than one") {
		t.Errorf("two formats: %+v", r)
	}
	path = blankImage(t, testSize)
	mkfs(t, path, makers["ext4"]...)
	if err := os.Truncate(path, testSize/2); err != nil {
		t.Fatal(err)
	}
	if r := probeFile(t, path); r.Content != Unknown || !strings.Contains(r.Detail, "spans") {
		t.Errorf("cut off: %+v", r)
	}
}

func TestD02_NoProofFromNothing(t *testing.T) {
	var none BlankDevice
	if none.Verify() == nil {
		t.Error("the zero BlankDevice proves something")
	}
	if _, b, err := OfPool(blankImage(t, testSize)); err == nil || b.Path() != "" {
		t.Error("a file was taken for a device")
	}
	in := BlankDevice{path: "x", size: 7}.Intent("ext4")
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var out Intent
	if err := json.Unmarshal(b, &out); err != nil || out != in {
		t.Errorf("%+v became %+v: %v", in, out, err)
	}
}

// D01: a file system of several devices is not taken. A tenant could name any device of the node in a superblock.
func TestD01_FileSystemsOfSeveralDevices(t *testing.T) {
	for name, argv := range map[string][]string{
		"btrfs": {"mkfs.btrfs", "-q", "DEVICE"}, "f2fs": {"mkfs.f2fs", "-q", "-O", "extra_attr,sb_checksum", "-c", "DEVICE"},
	} {
		path := blankImage(t, testSize)
		// f2fs has room for a path of 63 bytes.
		dir, err := os.MkdirTemp("", "d")
		if err != nil {
			t.Fatal(err)
		}
		second := filepath.Join(dir, "d")
		err = os.Rename(blankImage(t, testSize), second)
		if err == nil {
			mkfs(t, path, append(argv[:len(argv)-1], second)...)
		}
		if err := errors.Join(err, os.Remove(second), os.Remove(dir)); err != nil {
			t.Fatal(err)
		}
		if r := probeFile(t, path); r.Content != Unknown || !strings.Contains(r.Detail, "devices") {
			t.Errorf("%s: %+v", name, r)
		}
	}
	path := blankImage(t, testSize)
	mkfs(t, path, makers["f2fs"]...)
	patch(t, path, 4096+1024+2201, []byte("/dev/vda"))
	if r := probeFile(t, path); r.Content != Unknown || !strings.Contains(r.Detail, "devices") {
		t.Errorf("in the copy that the kernel uses if the first is damaged: %+v", r)
	}
	patch(t, path, 1024, make([]byte, 4))
	if r := probeFile(t, path); r.Content != Unknown || !strings.Contains(r.Detail, "only its copy") {
		t.Errorf("without the first: %+v", r)
	}
}

// D08: what the kernel recorded makes a check due.
func TestD08_ErrorsThatF2FSRecords(t *testing.T) {
	for _, at := range []int64{2762, 2762 + 31, 2794, 2794 + 15} { // s_stop_reason, s_errors
		path := blankImage(t, testSize)
		mkfs(t, path, "mkfs.f2fs", "-q", "-l", "naïve")
		if r := probeFile(t, path); r.Content != Known || r.NeedsCheck != "" || r.Label != "naïve" {
			t.Errorf("%+v", r)
		}
		patch(t, path, 1024+at, []byte{1})
		if r := probeFile(t, path); r.Content != Known || !strings.Contains(r.NeedsCheck, "recorded errors") {
			t.Errorf("at %d: %+v", at, r)
		}
	}
}

// oneByte is a device on which one byte is not zero.
type oneByte int64

func (at oneByte) ReadAt(b []byte, off int64) (int, error) {
	clear(b)
	if i := int64(at) - off; i >= 0 && i < int64(len(b)) {
		b[i] = 1
	}
	return len(b), nil
}

func TestD01_OneByteIsSeenWhereverItIsRead(t *testing.T) {
	const size = 1 << 30
	for _, piece := range []int64{0, headSize - 4096, headSize, headSize + 4096, 2*headSize - 4096, 2 * headSize, closeBy - 4096, 64 << 20,
		size / 64, size - tailSize, size - 4096} {
		for _, at := range []int64{0, 1, 2047, 2048, 4095} {
			r, err := Probe(oneByte(piece+at), size)
			if err != nil || r.Content != Unknown || !strings.Contains(r.Detail, fmt.Sprintf(" at offset %d", piece+at)) {
				t.Errorf("at %d: %+v %v", piece+at, r, err)
			}
		}
	}
}

// A node may format many volumes at once.
func TestAProofOfBlankTakesLittleMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if r, err := Probe(zeros{}, 1<<30); err != nil || r.Content != Blank {
		t.Fatal(r, err)
	}
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took > 2<<20 {
		t.Errorf("it took %d KiB", took>>10)
	}
}
