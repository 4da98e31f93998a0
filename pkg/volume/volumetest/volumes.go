package volumetest

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// whatIsMadeIsFound: a volume is found by its id, in the list and after a restart, and is not
// made again.
func whatIsMadeIsFound(s *suite) {
	begin := time.Now().Add(-time.Second)
	want := map[string]volume.Volume{}
	for _, name := range []string{"b", "a", "pvc-4f4e", "Ä name/with ..\n of everything", ""} {
		v := s.create(name, func(spec *volume.Spec) {
			spec.Parameters = map[string]string{"csi.storage.k8s.io/fstype": fsType, "k": name}
			spec.FSType, spec.Block = fsType, name == "b"
		})
		if v.ID != volume.VolumeID(Name, name) || v.Name != name || v.Size != size || v.FSType != fsType || v.Block != (name == "b") ||
			v.Parameters["k"] != name || v.Created.Before(begin) || v.Created.After(time.Now().Add(time.Second)) ||
			v.Facts != (volume.Facts{}) {
			s.Errorf("%+v was made", v)
		}
		want[v.ID] = v
	}
	look := func() {
		s.Helper()
		all := s.List()
		if len(all) != len(want) || !slices.IsSortedFunc(all, func(a, b volume.Volume) int { return strings.Compare(a.ID, b.ID) }) {
			s.Errorf("the list is %+v", all)
		}
		for _, v := range all {
			got, err := s.Get(v.ID)
			s.ok(err)
			for _, have := range []volume.Volume{v, got} {
				have.Created = have.Created.Round(0)
				w := want[v.ID]
				w.Created = w.Created.Round(0)
				if !reflect.DeepEqual(have, w) {
					s.Errorf("have %+v, want %+v", have, w)
				}
			}
		}
	}
	look()
	_, err := s.try("a", func(spec *volume.Spec) { spec.Size = 2 * size })
	s.refused("a volume that is there is made again", err, fault.Exists)
	look()
	s.reopen()
	look()
	gone := volume.VolumeID(Name, "b")
	for range 2 {
		s.ok(s.Delete(s.Context(), gone))
		_, err = s.Get(gone)
		s.refused("a volume that was deleted is looked for", err, fault.NotFound)
	}
	delete(want, gone)
	look()
	s.reopen()
	look()
}

// nobodyElsesIsFound: ids of other pools, of snapshots, of nothing, and texts that are not ids.
func nobodyElsesIsFound(s *suite) {
	v := s.create("v")
	snap := s.snapshot("v", v.ID)
	for _, id := range []string{
		volume.VolumeID(Name, "none"), volume.VolumeID("other", "v"), snap.ID, "", "v", "../volumes", Name + ".v", Name + "." + "v/../../v",
		v.ID + "\x00", v.ID + "0",
	} {
		calls := map[string]func() error{
			"Get":            func() error { _, err := s.Get(id); return err },
			"Allocated":      func() error { _, err := s.Allocated(id); return err },
			"Attach":         func() error { _, err := s.Attach(s.Context(), id); return err },
			"AttachReadOnly": func() error { _, err := s.AttachReadOnly(s.Context(), id); return err },
			"Expand":         func() error { _, err := s.Expand(s.Context(), id, 2*size); return err },
			"Refresh":        func() error { return s.Refresh(s.Context(), id) },
			"SetFacts":       func() error { return s.SetFacts(id, volume.Facts{Formatted: fsType}) },
			"a copy":         func() error { _, err := s.try("copy", func(spec *volume.Spec) { spec.SourceVolume = id }); return err },
			"a snapshot": func() error {
				_, err := s.CreateSnapshot(s.Context(), volume.SnapshotSpec{Name: "s", Volume: id}, &volume.Progress{})
				return err
			},
		}
		if id == "" {
			delete(calls, "a copy") // a copy of nothing is an empty volume
		}
		for name, call := range calls {
			s.refused(fmt.Sprintf("%s of %q", name, id), call(), fault.NotFound)
		}
		if a, ok, err := s.Attached(id); ok || err != nil && !fault.Is(err, fault.NotFound) {
			s.Errorf("Attached of %q: %v, %v", id, a, err)
		}
		if err := s.Delete(s.Context(), id); err != nil { // repeated calls must succeed
			s.Errorf("Delete of %q: %v", id, err)
		}
	}
	for _, id := range []string{volume.SnapshotID(Name, "none"), volume.SnapshotID("other", "v"), v.ID, "", "../snapshots"} {
		_, err := s.GetSnapshot(id)
		s.refused(fmt.Sprintf("GetSnapshot of %q", id), err, fault.NotFound)
		if err := s.DeleteSnapshot(s.Context(), id); err != nil {
			s.Errorf("DeleteSnapshot of %q: %v", id, err)
		}
	}
	if got, err := s.Get(v.ID); err != nil || got.Size != size {
		s.Errorf("the volume is %+v, %v", got, err)
	}
	if got, err := s.GetSnapshot(snap.ID); err != nil || got.Volume != v.ID {
		s.Errorf("the snapshot is %+v, %v", got, err)
	}
}

// factsAreKept: the facts decide whether a volume is ever formatted, so they must survive a
// restart.
func factsAreKept(s *suite) {
	v := s.create("v")
	facts := volume.Facts{Formatted: fsType, GivenRaw: true, GivenToGuest: true, GrowDue: true, IdentityDue: true}
	s.ok(s.SetFacts(v.ID, facts))
	for range 2 {
		if got, err := s.Get(v.ID); err != nil || got.Facts != facts {
			s.Errorf("the facts are %+v, %v", got.Facts, err)
		}
		s.reopen()
	}
}

// whatIsPromisedIsCounted: the sizes of volumes count until they are deleted. More than there
// is, is refused.
func whatIsPromisedIsCounted(s *suite) {
	promised := func(want int64) volume.Capacity {
		s.Helper()
		c, err := s.Capacity()
		s.ok(err)
		if c.Promised != want || c.Total <= 0 || c.Available < 0 || c.Available > c.Total || c.Used < 0 || c.Left < 0 {
			s.Errorf("%+v; want %d bytes to be promised", c, want)
		}
		return c
	}
	left := promised(0).Left
	a := s.create("a")
	b := s.create("b", func(spec *volume.Spec) { spec.Size = 3 * size })
	promised(4 * size)
	tooMuch := (left + left/2 + 1<<30) / s.Sizes().Fine * s.Sizes().Fine
	_, err := s.try("c", func(spec *volume.Spec) { spec.Size = tooMuch })
	s.refused("a volume for which there is no room", err, fault.NoSpace)
	_, err = s.Expand(s.Context(), a.ID, tooMuch)
	s.refused("growth for which there is no room", err, fault.NoSpace)
	if v, err := s.Get(a.ID); err != nil || v.Size != size || len(s.List()) != 2 {
		s.Errorf("what was refused left %+v, %v, of %v", v, err, s.List())
	}
	promised(4 * size)
	s.reopen()
	promised(4 * size)
	s.ok(s.Delete(s.Context(), b.ID))
	promised(size)
}

// thickIsReserved: the whole of a thick volume is reserved. A pool that cannot reserve refuses
// it (fault.Invalid).
func thickIsReserved(s *suite) {
	thin := s.create("thin")
	v, err := s.try("thick", func(spec *volume.Spec) { spec.Thick = true })
	if fault.Is(err, fault.Invalid) {
		s.Logf("the pool reserves nothing: %v", err)
		return
	}
	s.ok(err)
	reserved := func(atLeast int64) {
		s.Helper()
		if n, err := s.Allocated(v.ID); err != nil || n < atLeast {
			s.Errorf("%d bytes are reserved, %v; want %d", n, err, atLeast)
		}
	}
	reserved(size)
	if n, err := s.Allocated(thin.ID); err != nil || n > size/2 {
		s.Errorf("a thin volume takes %d bytes, %v", n, err)
	}
	s.has(s.attach(v.ID), size, nil)
	_, err = s.Expand(s.Context(), v.ID, 2*size)
	s.ok(err)
	reserved(2 * size)
	s.detach(v.ID)
}

// manyAtOnce: concurrent calls for different volumes do not interfere.
func manyAtOnce(s *suite) {
	var all sync.WaitGroup
	for i := range 12 {
		all.Go(func() {
			name := fmt.Sprint("v", i)
			err := func() error {
				v, err := s.try(name)
				if err != nil {
					return err
				}
				a, err := s.Attach(s.Context(), v.ID)
				if err != nil {
					return err
				}
				if err := write(a.Device, 4096, name); err != nil {
					return err
				}
				snap, err := s.CreateSnapshot(s.Context(),
					volume.SnapshotSpec{Name: name, Volume: v.ID, Quiesce: s.quiesce(v.ID, nil)}, &volume.Progress{})
				if err != nil {
					return err
				}
				if i%2 == 0 {
					return nil
				}
				if err := s.Detach(s.Context(), v.ID); err != nil {
					return err
				}
				if err := s.Delete(s.Context(), v.ID); err != nil {
					return err
				}
				return s.DeleteSnapshot(s.Context(), snap.ID)
			}()
			if err != nil {
				s.Errorf("%s: %v", name, err)
			}
		})
	}
	all.Wait()
	if n := len(s.List()); n != 6 {
		s.Errorf("%d volumes are left, want 6", n)
	}
	for _, v := range s.List() {
		s.has(s.attach(v.ID), size, map[int64]string{4096: v.Name})
	}
}
