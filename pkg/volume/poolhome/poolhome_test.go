package poolhome

import (
	"os"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

type one struct{ volume.Pool }

func (one) List() []volume.Volume { return []volume.Volume{{ID: "v"}} }

// Known data about a pool is available while its disk hangs, although the access to the disk
// holds the lock.
func TestMonitoring_WhatIsKnownOfAPoolNeedsNoDisk(t *testing.T) {
	p := &Pool{o: Options{Open: func() (volume.Pool, error) { return one{}, nil }}}
	p.looked.Store(true)
	if got := p.List(); got != nil {
		t.Errorf("before it was there: %v", got)
	}
	if err := p.Away(); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if got := p.List(); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

// A record without an identity is like an unreadable one: it does not make any directory the
// pool's.
func TestB03_ARecordThatNamesNoIdentity(t *testing.T) {
	o := Options{Name: "pool", Dir: t.TempDir(), State: t.TempDir(),
		Open: func() (volume.Pool, error) { return one{}, nil }}
	p := &Pool{o: o}
	if err := knownType.Write(p.statePath(), known{Dir: o.Dir}); err != nil {
		t.Fatal(err)
	}
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Away(); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a bare directory is the pool: %v", err)
	}
	if names, err := os.ReadDir(o.Dir); err != nil || len(names) > 0 {
		t.Errorf("made in the bare directory: %v, %v", names, err)
	}
	// The directory that has an identity is the pool's.
	if err := identityType.Write(p.path(), identity{ID: "a"}); err != nil {
		t.Fatal(err)
	}
	if err := p.Away(); err != nil {
		t.Error(err)
	}
}

// B03: Options without their parts are refused. Without Open, the first look at the pool would end the program.
func TestB03_APoolWantsItsParts(t *testing.T) {
	whole := Options{Name: "p", Dir: t.TempDir(), State: t.TempDir(), Open: func() (volume.Pool, error) { return one{}, nil }}
	for part, remove := range map[string]func(*Options){
		"Name": func(o *Options) { o.Name = "" }, "Dir": func(o *Options) { o.Dir = "" }, "State": func(o *Options) { o.State = "" },
		"Open": func(o *Options) { o.Open = nil },
	} {
		o := whole
		remove(&o)
		if _, err := Open(o); !fault.Is(err, fault.Invalid) {
			t.Errorf("without %s: %v", part, err)
		}
	}
}

// B04: ids name one volume if both pools are one directory, and if the volume is one.
func TestB04_OneVolumeUnderTwoNamesOfItsPool(t *testing.T) {
	state := t.TempDir()
	for name, id := range map[string]string{"old": "a", "new": "a", "other": "b", "none": "", "bare": ""} {
		if err := knownType.Write(recordOf(state, name), known{ID: id, Dir: "/" + name}); err != nil {
			t.Fatal(err)
		}
	}
	id := volume.VolumeID("old", "v")
	for other, want := range map[string]bool{
		volume.VolumeID("new", "v"): true, volume.VolumeID("new", "w"): false, volume.VolumeID("other", "v"): false,
		volume.VolumeID("unknown", "v"): false, volume.SnapshotID("new", "v"): false, "": false,
	} {
		if got, err := SameVolume(state, id, other); got != want || err != nil {
			t.Errorf("%s and %s: %v, %v", id, other, got, err)
		}
	}
	if same, err := SameVolume(state, volume.VolumeID("none", "v"), volume.VolumeID("bare", "v")); same || err != nil {
		t.Errorf("two directories without an identity are one: %v, %v", same, err)
	}
	if err := os.WriteFile(recordOf(state, "new"), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := SameVolume(state, id, volume.VolumeID("new", "v")); err == nil {
		t.Error("a record that cannot be read is taken for another identity")
	}
}
