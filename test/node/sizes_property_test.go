package node

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// sizes is a model of files that never get shorter: the last seen size of everything, and marks near its end.
type sizes struct {
	n      *testnode.Node
	armed  string // names the failpoint
	filler string
	serial int
	vols   []*sizedVolume
	snaps  []*sized
}

// sized is a volume or a snapshot.
type sized struct {
	id    string
	img   string
	file  int64           // bytes
	marks map[int64]int64 // what was written at an offset
}

type sizedVolume struct {
	sized
	csiclient.Volume
	target         string // where it is published
	device, fsSize int64  // bytes, while it is published
}

const markSize = 4096

// maybe expects success, or a code that a full pool or a kill may give. It reports whether the call succeeded.
func (m *sizes) maybe(t *rapid.T, err error, what string) bool {
	switch status.Code(err) {
	case codes.Unavailable:
		if end := m.n.Wait(); end == nil || end.Error() != "signal: killed" {
			t.Fatalf("%s: csi-node ended: %v", what, end)
		}
		m.disarm(t)
		m.n.Start()
		return false
	case codes.OK:
		return true
	case codes.ResourceExhausted:
		return false
	}
	t.Fatalf("%s: %v", what, err)
	return false
}

// arm draws the failpoint at which the next call is killed, or none.
func (m *sizes) arm(t *rapid.T, points ...string) {
	point := rapid.SampledFrom(append([]string{""}, points...)).Draw(t, "killed at")
	must(t, os.WriteFile(m.armed, []byte(point+" kill"), 0o600))
}

func (m *sizes) disarm(t *rapid.T) { must(t, os.WriteFile(m.armed, nil, 0o600)) }

func must(t *rapid.T, err error) {
	if err != nil {
		t.Fatal(err)
	}
}

// crowded draws whether the pool is full during a call. It spares file systems in use: other tests cover their writes on a full pool.
func (m *sizes) crowded(t *rapid.T) (release func()) {
	for _, v := range m.vols {
		if v.target != "" && !v.Block {
			return func() {}
		}
	}
	if rapid.IntRange(0, 3).Draw(t, "crowd") != 0 {
		return func() {}
	}
	fill(m.filler)
	return func() { _ = os.Remove(m.filler) }
}

// volume draws one. rapid's t.Skip draws another action; it skips no test.
func (m *sizes) volume(t *rapid.T) *sizedVolume {
	if len(m.vols) == 0 {
		t.Skip("no volume")
	}
	return m.vols[rapid.IntRange(0, len(m.vols)-1).Draw(t, "volume")]
}

func (m *sizes) create(t *rapid.T) { m.make(t, nil, nil, rapid.Bool().Draw(t, "raw"), 16<<20) }

func (m *sizes) restore(t *rapid.T) {
	if len(m.snaps) == 0 {
		t.Skip("no snapshot")
	}
	s := m.snaps[rapid.IntRange(0, len(m.snaps)-1).Draw(t, "snapshot")]
	m.make(t, snapshotOf(s.id), s, s.marks != nil, s.file+rapid.SampledFrom([]int64{0, 16 << 20}).Draw(t, "more"))
}

func (m *sizes) clone(t *rapid.T) {
	v := m.volume(t)
	if v.Block && v.target != "" {
		t.Skip("of a raw volume in use: another test's")
	}
	m.make(t, cloneOf(v.id), &v.sized, v.Block, v.file+rapid.SampledFrom([]int64{0, 16 << 20}).Draw(t, "more"))
}

func (m *sizes) make(t *rapid.T, source *csi.VolumeContentSource, of *sized, raw bool, bytes int64) {
	if len(m.vols) == 3 {
		t.Skip("enough")
	}
	m.serial++
	v := csiclient.Volume{Block: raw, FSType: "ext4"}
	if raw {
		v.FSType = ""
	}
	params := map[string]string{"provisioning": rapid.SampledFrom([]string{"thin", "thick"}).Draw(t, "provisioning")}
	create := func() (*csi.Volume, error) {
		return m.n.Client.Create(ctxOf(m.n.T), fmt.Sprint("v", m.serial), bytes, v, params, source)
	}
	m.arm(t, "create.recorded", "create.filled", "copy.done", "record.written", "record.renamed")
	release := m.crowded(t)
	made, err := create()
	release()
	done := m.maybe(t, err, "create")
	m.disarm(t)
	if !done {
		if made, err = create(); !m.maybe(t, err, "create, once more") {
			return
		}
	}
	v.ID = made.GetVolumeId()
	have := &sizedVolume{Volume: v, sized: sized{id: v.ID, img: image(m.n, v.ID), file: bytes}}
	if raw {
		have.marks = map[int64]int64{}
		if of != nil {
			for off, mark := range of.marks {
				have.marks[off] = mark
			}
		}
	}
	if made.GetCapacityBytes() < bytes {
		t.Fatalf("%d bytes were asked for, and the driver says %d", bytes, made.GetCapacityBytes())
	}
	m.vols = append(m.vols, have)
}

func (m *sizes) expand(t *rapid.T) {
	v := m.volume(t)
	want := v.file + rapid.SampledFrom([]int64{-8 << 20, 0, 16 << 20, 32 << 20, 512 << 20}).Draw(t, "by")
	m.arm(t, "expand.file", "expand.recorded", "record.written", "record.renamed")
	release := m.crowded(t)
	_, err := m.n.Client.ControllerExpandVolume(ctxOf(m.n.T), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: want}})
	done := m.maybe(t, err, "expand")
	m.disarm(t)
	if !done && rapid.Bool().Draw(t, "repeated") { // perhaps the pool is still full
		_, err = m.n.Client.ControllerExpandVolume(ctxOf(m.n.T), &csi.ControllerExpandVolumeRequest{
			VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: want}})
		done = m.maybe(t, err, "expand, once more")
	}
	release()
	if done && v.target != "" {
		_, err = m.n.Client.NodeExpandVolume(ctxOf(m.n.T), &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: v.target})
		if status.Code(err) != codes.FailedPrecondition { // a mounted ext4 does not grow without CAP_SYS_RESOURCE
			m.maybe(t, err, "node expand")
		}
	}
}

func (m *sizes) shrink(t *rapid.T) {
	v := m.volume(t)
	_, err := m.n.Client.ControllerExpandVolume(ctxOf(m.n.T), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{LimitBytes: v.file - 1}})
	if status.Code(err) != codes.OutOfRange {
		t.Fatalf("a limit below the size: %v", err)
	}
}

func (m *sizes) snapshot(t *rapid.T) {
	v := m.volume(t)
	if len(m.snaps) == 3 || v.Block && v.target != "" {
		t.Skip("enough, or another test's")
	}
	m.serial++
	m.arm(t, "snapshot.recorded", "copy.done", "copy.frozen", "record.renamed")
	release := m.crowded(t)
	s, err := m.n.Client.CreateSnapshot(ctxOf(m.n.T), &csi.CreateSnapshotRequest{SourceVolumeId: v.id, Name: fmt.Sprint("s", m.serial)})
	release()
	if m.maybe(t, err, "snapshot") {
		id := s.GetSnapshot().GetSnapshotId()
		have := &sized{id: id, img: snapshotImage(m.n, id), file: v.file}
		if v.marks != nil {
			have.marks = map[int64]int64{}
			for off, mark := range v.marks {
				have.marks[off] = mark
			}
		}
		if s.GetSnapshot().GetSizeBytes() < v.file {
			t.Fatalf("a snapshot of %d bytes says that it has %d", v.file, s.GetSnapshot().GetSizeBytes())
		}
		m.snaps = append(m.snaps, have)
	}
	m.disarm(t)
}

func (m *sizes) use(t *rapid.T) {
	v := m.volume(t)
	if v.target != "" {
		t.Skip("in use")
	}
	if err := m.n.Client.Stage(ctxOf(m.n.T), v.Volume); err != nil {
		t.Fatalf("stage: %v", err)
	}
	if err := m.n.Client.Publish(ctxOf(m.n.T), v.Volume, m.n.Target(v.id), false); err != nil {
		t.Fatalf("publish: %v", err)
	}
	v.target = m.n.Target(v.id)
	if v.device = shownSize(t, v); v.device < v.file {
		t.Fatalf("a file of %d bytes is shown as a device of %d", v.file, v.device)
	}
}

// release unpublishes and unstages; the data stays.
func (m *sizes) release(t *rapid.T) { m.letGo(t, m.volume(t)) }

func (m *sizes) letGo(t *rapid.T, v *sizedVolume) {
	if v.target == "" {
		return
	}
	err := m.n.Client.Unpublish(ctxOf(m.n.T), v.id, v.target)
	if err == nil {
		err = m.n.Client.Unstage(ctxOf(m.n.T), v.id)
	}
	if err != nil {
		t.Fatalf("release: %v", err)
	}
	v.target, v.device = "", 0
}

// mark writes into the last block of a raw volume's device at its current size.
func (m *sizes) mark(t *rapid.T) {
	v := m.volume(t)
	if v.target == "" || !v.Block {
		t.Skip("not a raw volume in use")
	}
	off := shownSize(t, v) - markSize
	m.serial++
	f, err := os.OpenFile(v.target, os.O_RDWR|os.O_SYNC, 0)
	if err == nil {
		_, err = f.WriteAt(markOf(int64(m.serial)), off)
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	v.marks[off] = int64(m.serial)
}

func markOf(serial int64) []byte {
	return bytes.Repeat([]byte(fmt.Sprintf("%08d", serial)), markSize/8)
}

func shownSize(t *rapid.T, v *sizedVolume) int64 {
	path := v.target
	if !v.Block {
		var st unix.Stat_t
		must(t, unix.Stat(path, &st))
		path = fmt.Sprintf("/dev/loop%d", unix.Minor(st.Dev))
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, err := f.Seek(0, 2)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// check expects that nothing is shorter than before.
func (m *sizes) check(t *rapid.T) {
	all := slices.Clone(m.snaps)
	for _, v := range m.vols {
		all = append(all, &v.sized)
		r, err := m.n.Client.ControllerGetVolume(ctxOf(m.n.T), &csi.ControllerGetVolumeRequest{VolumeId: v.id})
		if err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(v.img); err != nil || st.Size() != r.GetVolume().GetCapacityBytes() {
			t.Fatalf("the file has %d bytes, the driver says %d", st.Size(), r.GetVolume().GetCapacityBytes())
		}
		if v.target == "" {
			continue
		}
		now := shownSize(t, v)
		if now < v.device {
			t.Fatalf("a device got shorter: %d, then %d", v.device, now)
		}
		v.device = now
		if !v.Block {
			var st unix.Statfs_t
			if err := unix.Statfs(v.target, &st); err != nil || int64(st.Blocks) < v.fsSize {
				t.Fatalf("a file system got smaller: %d, then %d blocks (%v)", v.fsSize, st.Blocks, err)
			}
			v.fsSize = int64(st.Blocks)
		}
	}
	for _, s := range all {
		st, err := os.Stat(s.img)
		if err != nil || st.Size() < s.file {
			t.Fatalf("%s got shorter: %d, then %v (%v)", s.id, s.file, st, err)
		}
		s.file = st.Size()
		f, err := os.Open(s.img)
		if err != nil {
			t.Fatal(err)
		}
		for off, mark := range s.marks {
			got := make([]byte, markSize)
			if _, err := f.ReadAt(got, off); err != nil || !bytes.Equal(got, markOf(mark)) {
				t.Fatalf("%s lost mark %d at %d: %q (%v)", s.id, mark, off, got[:8], err)
			}
		}
		f.Close()
	}
}

func (m *sizes) end(t *rapid.T) {
	m.disarm(t)
	_ = os.Remove(m.filler)
	if t.Failed() {
		m.n.Restart()
	}
	for _, v := range m.vols {
		m.letGo(t, v)
		must(t, m.n.Client.Delete(ctxOf(m.n.T), v.id))
	}
	for _, s := range m.snaps {
		if _, err := m.n.Client.DeleteSnapshot(ctxOf(m.n.T), &csi.DeleteSnapshotRequest{SnapshotId: s.id}); err != nil {
			t.Fatal(err)
		}
	}
}

// set changes a flag for a test.
func set(t *testing.T, name, value string) {
	t.Helper()
	f := flag.Lookup(name)
	was := f.Value.String()
	ok(t, f.Value.Set(value))
	t.Cleanup(func() { ok(t, f.Value.Set(was)) })
}

// A04: sizes of file, record, device and file system, with kills at every step and pools that are full or not, in any order. All tests
// share the flags, so it runs alone.
func TestA04_NothingEverGetsShorter(t *testing.T) {
	set(t, "rapid.checks", "5")
	set(t, "rapid.steps", "20")
	set(t, "rapid.shrinktime", "20s")
	set(t, "rapid.nofailfile", "true")
	for _, pool := range []string{"ext4", "xfs"} {
		t.Run("pool on "+pool, func(t *testing.T) {
			n := stoppedOnPool(t, pool, "failpoint", 384<<20)
			armed := filepath.Join(n.Dir, "failpoint")
			n.Env = []string{"CRUST_FAILPOINT_FILE=" + armed}
			n.Begin()
			serial := 0
			rapid.Check(t, func(rt *rapid.T) {
				m := &sizes{n: n, armed: armed, filler: filepath.Join(filepath.Dir(n.PoolDir()), "filler"), serial: serial}
				defer func() { serial = m.serial; m.end(rt) }()
				rt.Repeat(map[string]func(*rapid.T){
					"create": m.create, "expand": m.expand, "expand more": m.expand, "expand again": m.expand, "shrink": m.shrink,
					"snapshot": m.snapshot,
					"restore":  m.restore, "clone": m.clone, "use": m.use, "release": m.release, "mark": m.mark,
					"mark more": m.mark, "": m.check,
				})
			})
		})
	}
}
