package volumetest

import (
	"context"
	"errors"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

func from(snapshot string) func(*volume.Spec) {
	return func(spec *volume.Spec) { spec.SourceSnapshot = snapshot }
}

func long(bytes int64) func(*volume.Spec) { return func(spec *volume.Spec) { spec.Size = bytes } }

// snapshots: a snapshot keeps the content of its moment, whatever happens to the volume.
func snapshots(s *suite) {
	v := s.create("v", func(spec *volume.Spec) { spec.FSType = fsType })
	s.ok(s.SetFacts(v.ID, volume.Facts{Formatted: fsType, GivenToGuest: true}))
	d := s.attach(v.ID)
	s.put(d, 0, "one")
	one := s.snapshot("one", v.ID)
	if one.ID != volume.SnapshotID(Name, "one") || one.Name != "one" || one.Volume != v.ID || one.Size != size || one.FSType != fsType ||
		one.Facts.Formatted != fsType || !one.Facts.GivenToGuest || one.Created.Before(v.Created) {
		s.Errorf("%+v was taken", one)
	}
	s.put(d, 0, "two")
	two := s.snapshot("two", v.ID)
	s.put(d, 0, "now")
	_, err := s.CreateSnapshot(s.Context(), volume.SnapshotSpec{Name: "one", Volume: v.ID}, &volume.Progress{})
	s.refused("a snapshot that is there is taken again", err, fault.Exists)
	look := func() {
		s.Helper()
		if all := s.ListSnapshots(); len(all) != 2 {
			s.Errorf("the list is %+v", all)
		}
		for _, want := range []volume.Snapshot{one, two} {
			if got, err := s.GetSnapshot(want.ID); err != nil || got.Volume != v.ID || got.Facts != want.Facts ||
				!got.Created.Equal(want.Created) {
				s.Errorf("have %+v, %v; want %+v", got, err, want)
			}
		}
	}
	look()
	s.has(d, size, map[int64]string{0: "now"})
	a := s.create("a", from(one.ID))
	if a.SourceSnapshot != one.ID || !a.Facts.IdentityDue || a.Facts.GrowDue || a.Facts.Formatted != fsType || !a.Facts.GivenToGuest {
		s.Errorf("of a snapshot %+v was made", a)
	}
	s.has(s.attach(a.ID), size, map[int64]string{0: "one"})
	s.detach(v.ID)
	s.ok(s.Delete(s.Context(), v.ID))
	s.reopen()
	look()
	b := s.create("b", from(two.ID), long(2*size))
	if !b.Facts.GrowDue {
		s.Errorf("of a smaller snapshot %+v was made", b)
	}
	s.has(s.attach(b.ID), 2*size, map[int64]string{0: "two"})
	_, err = s.try("c", from(one.ID), long(size/2))
	s.refused("a copy that is smaller than its origin", err, fault.OutOfRange)
	for range 2 {
		s.ok(s.DeleteSnapshot(s.Context(), one.ID))
	}
	_, err = s.try("c", from(one.ID))
	s.refused("a copy of a snapshot that was deleted", err, fault.NotFound)
	s.has(s.attach(a.ID), size, map[int64]string{0: "one"})
	s.ok(s.DeleteSnapshot(s.Context(), two.ID)) // Check may report one without its volume
}

// quiesceIsUndone: a quiesced volume is resumed exactly once, whether or not the copy
// succeeded.
func quiesceIsUndone(s *suite) {
	v := s.create("v")
	d := s.attach(v.ID)
	s.put(d, 0, "data")
	resumed := 0
	spec := volume.SnapshotSpec{Name: "s", Volume: v.ID, Quiesce: s.quiesce(v.ID, &resumed)}
	snap, err := s.CreateSnapshot(s.Context(), spec, &volume.Progress{})
	s.ok(err)
	clone, err := s.try("clone", func(c *volume.Spec) { c.SourceVolume, c.Quiesce = v.ID, s.quiesce(v.ID, &resumed) })
	s.ok(err)
	if resumed != 2 {
		s.Errorf("the volume was resumed %d times for 2 copies", resumed)
	}
	s.has(s.attach(clone.ID), size, map[int64]string{0: "data"})
	broken := errors.New("it cannot stand still")
	spec.Name, spec.Quiesce = "t", func(context.Context) (volume.Stillness, error) { return volume.Stillness{}, broken }
	if _, err := s.CreateSnapshot(s.Context(), spec, &volume.Progress{}); !errors.Is(err, broken) {
		s.Errorf("a volume that does not stand still: %v", err)
	}
	resume := errors.New("it stands still for ever")
	spec.Quiesce = func(context.Context) (volume.Stillness, error) {
		return volume.Stillness{Resume: func() error { return resume }}, nil
	}
	if _, err := s.CreateSnapshot(s.Context(), spec, &volume.Progress{}); !errors.Is(err, resume) {
		s.Errorf("a volume that is not resumed: %v", err)
	}
	if all := s.ListSnapshots(); len(all) != 1 || all[0].ID != snap.ID {
		s.Errorf("the list is %+v", all)
	}
}

// copiesAreApart: a copy is independent of its origin, even if that is in use, and of other
// copies.
func copiesAreApart(s *suite) {
	v := s.create("v")
	s.ok(s.SetFacts(v.ID, volume.Facts{Formatted: fsType}))
	d := s.attach(v.ID)
	s.put(d, 0, "origin")
	copied := s.create("copy", long(3*size), func(spec *volume.Spec) { spec.SourceVolume, spec.Quiesce = v.ID, s.quiesce(v.ID, nil) })
	if copied.SourceVolume != v.ID || copied.Facts.Formatted != fsType || !copied.Facts.IdentityDue || !copied.Facts.GrowDue {
		s.Errorf("%+v was made", copied)
	}
	c := s.attach(copied.ID)
	s.has(c, 3*size, map[int64]string{0: "origin"})
	s.put(c, 0, "copied")
	s.put(d, 4096, "later")
	s.has(d, size, map[int64]string{0: "origin", 4096: "later"})
	s.has(c, 3*size, map[int64]string{0: "copied"})
	s.detach(v.ID)
	s.ok(s.Delete(s.Context(), v.ID))
	s.has(c, 3*size, map[int64]string{0: "copied"})
}

// aCopyThatFails: a failed copy leaves nothing, and its origin is unchanged.
func aCopyThatFails(s *suite) {
	v := s.create("v")
	for name, spec := range map[string]func(*volume.Spec){
		"of a snapshot that is not there": from(volume.SnapshotID(Name, "none")),
		"of a volume that is not there":   func(spec *volume.Spec) { spec.SourceVolume = volume.VolumeID(Name, "none") },
	} {
		_, err := s.try("copy", spec)
		s.refused("a copy "+name, err, fault.NotFound)
	}
	d := s.attach(v.ID)
	texts := map[int64]string{}
	for at := int64(0); at < size; at += 1 << 20 {
		texts[at] = strings.Repeat("data", 1<<16)
		s.put(d, at, texts[at])
	}
	broken := errors.New("it cannot stand still")
	for what, quiesce := range map[string]volume.Quiesce{
		"quiesce": func(context.Context) (volume.Stillness, error) { return volume.Stillness{}, broken },
		"resume": func(context.Context) (volume.Stillness, error) {
			return volume.Stillness{Resume: func() error { return broken }}, nil
		},
	} {
		_, err := s.try("copy", func(spec *volume.Spec) { spec.SourceVolume, spec.Quiesce = v.ID, quiesce })
		if !errors.Is(err, broken) || len(s.List()) != 1 {
			s.Errorf("%s failed: %v, and there are %+v", what, err, s.List())
		}
	}
	left, cancel := context.WithCancel(s.Context())
	defer cancel()
	spec := volume.Spec{Name: "copy", Size: size, SourceVolume: v.ID, Quiesce: func(ctx context.Context) (volume.Stillness, error) {
		cancel()
		return s.quiesce(v.ID, nil)(ctx)
	}}
	made := 1
	if _, err := s.Create(left, spec, &volume.Progress{}); err == nil {
		made = 2 // a pool may finish before it checks the context
	}
	if all := s.List(); len(all) != made {
		s.Errorf("the list is %+v", all)
	}
	s.has(d, size, texts)
}
