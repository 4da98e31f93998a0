package looppool

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

// withVolume returns a pool that has one volume.
func withVolume(t *testing.T) (*Pool, volume.Volume) {
	t.Helper()
	p, err := Open(Options{Name: "p", Dir: t.TempDir(), NodesDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	v, err := p.Create(t.Context(), volume.Spec{Name: "v", Size: 1 << 20}, &volume.Progress{})
	if err != nil {
		t.Fatal(err)
	}
	return p, v
}

// D06: to create an object that exists, or whose file may belong to somebody, is an error and
// changes nothing. The driver checks first; this covers the case that it could not.
func TestD06_WhatIsThereIsNotMadeAgain(t *testing.T) {
	p, v := withVolume(t)
	snapshot := func(name string) (volume.Snapshot, error) {
		return p.CreateSnapshot(t.Context(), volume.SnapshotSpec{Name: name, Volume: v.ID}, &volume.Progress{})
	}
	if _, err := snapshot("s"); err != nil {
		t.Fatal(err)
	}
	_, key, _, _ := volume.ParseID(volume.SnapshotID("p", "lost"))
	lost := p.snapshotPath(key)
	if err := os.WriteFile(lost, []byte("somebody's data"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := tree(t, p.dir)
	if _, err := p.Create(t.Context(), volume.Spec{Name: "v", Size: 1 << 20}, &volume.Progress{}); !fault.Is(err, fault.Exists) {
		t.Errorf("a volume that is there: %v", err)
	}
	if _, err := snapshot("s"); !fault.Is(err, fault.Exists) {
		t.Errorf("a snapshot that is there: %v", err)
	}
	if _, err := snapshot("lost"); !fault.Is(err, fault.State) {
		t.Errorf("a snapshot where a file lies that no record tells of: %v", err)
	}
	if b, err := os.ReadFile(lost); err != nil || string(b) != "somebody's data" {
		t.Errorf("%s has %.20q now: %v", filepath.Base(lost), b, err)
	}
	for i, now := range tree(t, p.dir) {
		if i >= len(before) || now != before[i] {
			t.Errorf("changed: %s", now)
		}
	}
}

// D06: an object that cannot be removed keeps its record. A file without a record would take
// room forever.
func TestD06_AFileThatIsNotRemovedKeepsItsRecord(t *testing.T) {
	p, v := withVolume(t)
	s, err := p.CreateSnapshot(t.Context(), volume.SnapshotSpec{Name: "s", Volume: v.ID}, &volume.Progress{})
	if err != nil {
		t.Fatal(err)
	}
	_, key, _, _ := volume.ParseID(s.ID)
	img := p.snapshotPath(key)
	if err := errors.Join(os.Remove(img), os.MkdirAll(filepath.Join(img, "stuck"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := p.DeleteSnapshot(t.Context(), s.ID); err == nil {
		t.Error("a snapshot that cannot be removed is deleted")
	}
	if _, err := os.Stat(p.snapshots.Path(key, journal.Extension)); err != nil {
		t.Errorf("its record: %v", err)
	}
	if err := os.Remove(filepath.Join(img, "stuck")); err != nil {
		t.Fatal(err)
	}
	if err := p.DeleteSnapshot(t.Context(), s.ID); err != nil {
		t.Errorf("a repeated deletion: %v", err)
	}
	if left := tree(t, filepath.Join(p.dir, "snapshots")); len(left) != 1 {
		t.Errorf("%v are left", left)
	}
}
