package journal_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/journal"
)

func open(t *testing.T, o journal.Options) *journal.Book[journal.VolumeRecord] {
	t.Helper()
	o.Pool, o.Format = "p", journal.Format{Kind: "test.volume", Version: 1}
	b, err := journal.OpenVolumes(o)
	ok(t, err)
	return b
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func made(name string, state journal.State) (id, key string, r journal.VolumeRecord) {
	id = volume.VolumeID("p", name)
	_, key, _, _ = volume.ParseID(id)
	return id, key, journal.VolumeRecord{State: state, Volume: volume.Volume{ID: id, Name: name, Size: 4096}}
}

// D06: unfinished creations and deletions are distinguished from finished objects, after a
// restart too.
func TestD06_WhatWasBegunIsKnown(t *testing.T) {
	dir := t.TempDir()
	b := open(t, journal.Options{Dir: dir})
	want := map[journal.State]fault.Kind{journal.Creating: fault.NotFound, journal.Deleting: fault.Busy}
	for _, state := range []journal.State{journal.Creating, journal.Ready, journal.Deleting} {
		_, key, r := made(string(state), state)
		ok(t, b.Put(key, r))
	}
	for range 2 {
		for state, kind := range want {
			id, key, r := made(string(state), state)
			if got, found, err := b.Find(id); got != key || found.State != state || !fault.Is(err, kind) {
				t.Errorf("%s: %q %+v %v", state, got, found, err)
			}
			if have, there := b.Look(key); !there || have.Volume.ID != r.Volume.ID {
				t.Errorf("%s: %+v, %v", state, have, there)
			}
		}
		if list := b.Ready(); len(list) != 1 || list[0].Volume.Name != "ready" || len(b.All()) != 3 {
			t.Errorf("ready are %+v, of %+v", list, b.All())
		}
		for state, kind := range map[journal.State]fault.Kind{journal.Ready: fault.Exists, journal.Deleting: fault.Busy} {
			id, _, _ := made(string(state), state)
			if err := b.Free(id, "its data", true); !fault.Is(err, kind) {
				t.Errorf("%s is made again: %v", state, err)
			}
		}
		id, _, _ := made("creating", journal.Creating)
		if err := b.Free(id, "its data", true); err != nil {
			t.Errorf("what was begun is not made anew: %v", err)
		}
		other, _, _ := made("new", journal.Creating)
		if err := b.Free(other, "its data", true); !fault.Is(err, fault.State) {
			t.Errorf("data that no record tells of: %v", err)
		}
		b = open(t, journal.Options{Dir: dir})
	}
	_, key, _ := made("ready", journal.Ready)
	ok(t, b.Forget(key))
	ok(t, b.Forget(key))
	if b = open(t, journal.Options{Dir: dir}); len(b.All()) != 2 || b.Has(key) {
		t.Errorf("%+v are left", b.All())
	}
}

// A10: an unusable record affects only its volume, and stays in its place.
func TestA10_ARecordThatCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	b := open(t, journal.Options{Dir: dir})
	id, key, r := made("good", journal.Ready)
	ok(t, b.Put(key, r))
	bad, torn, _ := made("bad", journal.Ready)
	ok(t, os.WriteFile(filepath.Join(dir, torn+journal.Extension), []byte("{"), 0o600))
	_, moved, _ := made("moved", journal.Ready)
	whole, err := os.ReadFile(b.Path(key, journal.Extension))
	ok(t, err)
	ok(t, os.WriteFile(filepath.Join(dir, moved+journal.Extension), whole, 0o600)) // the record of another volume
	b = open(t, journal.Options{Dir: dir})
	if got, _, err := b.Find(id); got != key || err != nil {
		t.Errorf("the good one: %q, %v", got, err)
	}
	for _, k := range []string{torn, moved} {
		got, _, err := b.Find("p." + k)
		if got != k || err == nil || fault.Is(err, fault.NotFound) || !b.Has(k) || b.Unusable("p."+k) == nil {
			t.Errorf("%s: %q, %v", k, got, err)
		}
		if err := b.Free("p."+k, "its data", false); err == nil {
			t.Errorf("%s is made again", k)
		}
	}
	if text, err := os.ReadFile(filepath.Join(dir, torn+journal.Extension)); err != nil || string(text) != "{" {
		t.Errorf("the record of %s became %q, %v", bad, text, err)
	}
}

// A05: a pool may reserve room for records. Records of new objects do not use it.
func TestA05_WhichRecordsAreNeeded(t *testing.T) {
	full := errors.New("no space")
	b := open(t, journal.Options{Dir: t.TempDir(), Write: func(write func() error, needed bool) error {
		if !needed {
			return full
		}
		return write()
	}})
	_, key, r := made("v", journal.Creating)
	if err := b.Put(key, r); !errors.Is(err, full) || b.Has(key) {
		t.Errorf("what is only to be made: %v, %v", err, b.Has(key))
	}
	for _, state := range []journal.State{journal.Ready, journal.Deleting} {
		r.State = state
		ok(t, b.Put(key, r))
		if err := b.PutIfRoom(key, r); !errors.Is(err, full) {
			t.Errorf("%s, if there is room: %v", state, err)
		}
	}
}
