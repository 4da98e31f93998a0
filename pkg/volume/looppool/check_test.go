package looppool

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// pooled is a pool's directory that a test fills directly.
type pooled struct {
	t   *testing.T
	dir string
}

func newPooled(t *testing.T) pooled {
	p := pooled{t, t.TempDir()}
	for _, sub := range []string{"volumes", "snapshots"} {
		if err := os.Mkdir(filepath.Join(p.dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p pooled) file(path string, bytes int64) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(p.dir, path), nil, 0o600); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(p.dir, path), bytes); err != nil {
		p.t.Fatal(err)
	}
}

// volume writes the record of a volume of 4096 bytes, and returns its key.
func (p pooled) volume(name string, state journal.State) string {
	p.t.Helper()
	v := volume.Volume{ID: volume.VolumeID("p", name), Name: name, Size: 4096}
	_, key, _, _ := volume.ParseID(v.ID)
	if err := volumeType.Write(filepath.Join(p.dir, "volumes", key+".json"), journal.VolumeRecord{State: state, Volume: v}); err != nil {
		p.t.Fatal(err)
	}
	return key
}

func (p pooled) snapshot(name, of string, state journal.State) string {
	p.t.Helper()
	s := volume.Snapshot{ID: volume.SnapshotID("p", name), Name: name, Volume: volume.VolumeID("p", of), Size: 4096}
	_, key, _, _ := volume.ParseID(s.ID)
	if err := snapshotType.Write(filepath.Join(p.dir, "snapshots", key+".json"),
		journal.SnapshotRecord{State: state, Snapshot: s}); err != nil {
		p.t.Fatal(err)
	}
	return key
}

// tree describes the content of a directory, with sizes and times.
func tree(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := os.Lstat(path)
		if err == nil {
			all = append(all, fmt.Sprint(path, st.Mode(), st.Size(), st.ModTime()))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestB08_PoolCheckFindsWhatDoesNotFit(t *testing.T) {
	p := newPooled(t)
	want := map[string]volume.Kind{} // by the end of the path
	good := p.volume("good", journal.Ready)
	p.file("volumes/"+good+".img", 4096)
	kept := p.snapshot("of-good", "good", journal.Ready)
	p.file("snapshots/"+kept+".img", 4096)

	short := p.volume("short", journal.Ready)
	p.file("volumes/"+short+".img", 4095)
	want[short+".img"] = volume.FileTooShort
	long := p.volume("long", journal.Ready)
	p.file("volumes/"+long+".img", 8192)
	want[long+".img"] = volume.FileTooLong
	want[p.volume("gone", journal.Ready)+".img"] = volume.RecordWithoutFile
	making := p.volume("making", journal.Creating)
	want[making+".json"] = volume.Unfinished
	p.file("volumes/"+making+".img", 10) // being filled
	want[p.volume("going", journal.Deleting)+".json"] = volume.Unfinished
	_, lost, _, _ := volume.ParseID(volume.VolumeID("p", "lost"))
	p.file("volumes/"+lost+".img", 4096)
	want[lost+".img"] = volume.FileWithoutRecord
	p.file("volumes/"+good+".json.tmp", 10)
	want[good+".json.tmp"] = volume.LeftOver
	p.file("volumes/note.txt", 10)
	want["note.txt"] = volume.UnknownFile
	_, torn, _, _ := volume.ParseID(volume.VolumeID("p", "torn"))
	p.file("volumes/"+torn+".json", 10)
	p.file("volumes/"+torn+".img", 4096)
	want[torn+".json"] = volume.RecordUnusable
	p.file("snapshots/"+p.snapshot("of-torn", "torn", journal.Ready)+".img", 4096) // its volume exists in some form
	alone := p.snapshot("alone", "deleted", journal.Ready)
	p.file("snapshots/"+alone+".img", 4096)
	want[alone+".img"] = volume.SnapshotAlone

	before := tree(t, p.dir)
	c, err := CheckDir("p", p.dir)
	if err != nil {
		t.Fatal(err)
	}
	if after := tree(t, p.dir); !slices.Equal(before, after) {
		t.Errorf("the check changed the pool:\n%s\n\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
	for _, f := range c.Findings {
		name := filepath.Base(f.Path)
		if want[name] != f.Kind || f.Means == "" || f.Do == "" {
			t.Errorf("%s: %+v, want kind %q", name, f, want[name])
		}
		if f.ID != "" && !strings.HasPrefix(name, strings.TrimPrefix(f.ID, "p.")) {
			t.Errorf("%s is said to be of %s", name, f.ID)
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("not found: %v", want)
	}
	var names []string
	for _, v := range c.Volumes {
		names = append(names, v.Name)
	}
	slices.Sort(names)
	if fmt.Sprint(names) != "[gone good long short]" {
		t.Errorf("the volumes are %v", names)
	}
}

func TestB08_PoolCheckOfNoPoolIsAnError(t *testing.T) {
	if c, err := CheckDir("p", t.TempDir()); err == nil {
		t.Errorf("%+v", c)
	}
}
