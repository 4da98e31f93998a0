// Package volumetest is a conformance test for pools. A pool must pass it before a driver
// serves it. The suite makes real volumes, devices, snapshots and copies, as root, and checks
// what users would notice: the data on the devices.
package volumetest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// Open opens the pool called Name in a directory. What a closed pool made there must be there
// again.
type Open func(t testing.TB, dir string) volume.Pool

// Name is the required name of the pool.
const Name = "suite"

// size is the size of the suite's volumes, in bytes: small enough for any pool, and quick to
// read.
const size = 16 << 20

// fsType is the file system type given to volumes. A pool need not know it.
const fsType = "anyfs"

// TestPool runs the suite. Each part has a pool of its own, which must be empty at the end.
func TestPool(t *testing.T, open Open) {
	for _, part := range []struct {
		name string
		test func(*suite)
	}{
		{"WhatIsMadeIsFound", whatIsMadeIsFound},
		{"NobodyElsesIsFound", nobodyElsesIsFound},
		{"D02_FactsAreKept", factsAreKept},
		{"A05_WhatIsPromisedIsCounted", whatIsPromisedIsCounted},
		{"B01_ThickIsReserved", thickIsReserved},
		{"TheDeviceHasTheData", theDeviceHasTheData},
		{"SizesAreAsToldBefore", sizesAreAsToldBefore},
		{"VolumesAreApart", volumesAreApart},
		{"D03_InUseIsLeftAlone", inUseIsLeftAlone},
		{"R01_ReadOnlyDevices", readOnlyDevices},
		{"A11_DevicesForPods", devicesForPods},
		{"D09_ItGrowsAndNeverShrinks", itGrows},
		{"A03_SnapshotsAreOfOneInstant", snapshots},
		{"A03_QuiesceIsUndone", quiesceIsUndone},
		{"D09_CopiesAreApart", copiesAreApart},
		{"A04_ACopyThatFailsLeavesNothing", aCopyThatFails},
		{"ManyAtOnce", manyAtOnce},
	} {
		t.Run(part.name, func(t *testing.T) {
			s := &suite{T: t, dir: t.TempDir(), open: open}
			s.reopen()
			defer s.end()
			part.test(s)
		})
	}
}

type suite struct {
	*testing.T
	dir  string
	open Open
	volume.Pool
}

// reopen simulates a restart of the driver.
func (s *suite) reopen() {
	s.Helper()
	if s.Pool != nil {
		s.ok(s.Close())
	}
	s.Pool = s.open(s.T, s.dir)
	if got := s.Pool.Name(); got != Name {
		s.Fatalf("the pool is called %q, want %q", got, Name)
	}
	s.ok(s.Usable())
	s.ok(s.Recover(func(volume.Source, string) error { return nil }))
}

// end removes everything and checks that nothing is left.
func (s *suite) end() {
	s.Helper()
	found, err := s.Check()
	if err != nil || len(found) > 0 {
		s.Errorf("what does not fit together: %v, %v", found, err)
	}
	for _, a := range s.Health("") {
		if a.Fatal || a.Lost {
			s.Errorf("the pool is not well: %s: %s", a.Reason, a.Message)
		}
	}
	failed := func(err error) {
		s.Helper()
		if err != nil {
			s.Error(err)
		}
	}
	for _, v := range s.List() {
		for _, a := range s.Health(v.ID) {
			if a.Fatal || a.Lost {
				s.Errorf("%s is not well: %s: %s", v.Name, a.Reason, a.Message)
			}
		}
		failed(s.Detach(s.Context(), v.ID))
	}
	for _, snap := range s.ListSnapshots() {
		failed(s.DeleteSnapshot(s.Context(), snap.ID))
	}
	for _, v := range s.List() {
		failed(s.Delete(s.Context(), v.ID))
	}
	if c, err := s.Capacity(); err != nil || c.Promised != 0 || c.Used != 0 {
		s.Errorf("an empty pool has promised %d bytes and uses %d, %v", c.Promised, c.Used, err)
	}
	s.ok(s.Close())
}

func (s *suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// refused expects an error of one of the kinds.
func (s *suite) refused(what string, err error, kinds ...fault.Kind) {
	s.Helper()
	if !slices.ContainsFunc(kinds, func(k fault.Kind) bool { return fault.Is(err, k) }) {
		s.Errorf("%s: %v; want one of %v", what, err, kinds)
	}
}

func (s *suite) create(name string, change ...func(*volume.Spec)) volume.Volume {
	s.Helper()
	v, err := s.try(name, change...)
	s.ok(err)
	return v
}

func (s *suite) try(name string, change ...func(*volume.Spec)) (volume.Volume, error) {
	spec := volume.Spec{Name: name, Size: size, Parameters: map[string]string{}}
	for _, f := range change {
		f(&spec)
	}
	return s.Create(s.Context(), spec, &volume.Progress{})
}

func (s *suite) snapshot(name, id string) volume.Snapshot {
	s.Helper()
	snap, err := s.CreateSnapshot(s.Context(), volume.SnapshotSpec{Name: name, Volume: id, Quiesce: s.quiesce(id, nil)}, &volume.Progress{})
	s.ok(err)
	return snap
}

// quiesce writes back the volume's device, as the driver does.
func (s *suite) quiesce(id string, resumed *int) volume.Quiesce {
	return func(context.Context) (volume.Stillness, error) {
		still := volume.Stillness{Resume: func() error {
			if resumed != nil {
				*resumed++
			}
			return nil
		}}
		a, ok, err := s.Attached(id)
		if err == nil && ok {
			err = mounter.Flush(a.Device)
		}
		return still, err
	}
}

func (s *suite) attach(id string) mounter.Device {
	s.Helper()
	a, err := s.Attach(s.Context(), id)
	s.ok(err)
	now, ok, err := s.Attached(id)
	if err != nil || !ok || !now.Device.Same(a.Device) {
		s.Fatalf("Attach made %v, and Attached says %v %v, %v", a, now, ok, err)
	}
	return a.Device
}

func (s *suite) detach(id string) {
	s.Helper()
	s.ok(s.Detach(s.Context(), id))
	if a, ok, err := s.Attached(id); ok || err != nil {
		s.Errorf("detached, and attached all the same: %v %v, %v", a, ok, err)
	}
}

// owned expects a device to belong to the volume.
func (s *suite) owned(d mounter.Device, id string) {
	s.Helper()
	if got, ok, err := s.Owns(d); got != id || !ok || err != nil {
		s.Errorf("%s belongs to %q, %v, %v; want %s", d.Path, got, ok, err, id)
	}
}

// put writes a text to a device, durably.
func (s *suite) put(d mounter.Device, at int64, text string) {
	s.Helper()
	s.ok(write(d, at, text))
}

func write(d mounter.Device, at int64, text string) error {
	f, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(text), at)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// has expects a device of that size in bytes, with the texts and zeros elsewhere.
func (s *suite) has(d mounter.Device, bytesLong int64, texts map[int64]string) {
	s.Helper()
	if n, err := mounter.DeviceSize(d); err != nil || n != bytesLong {
		s.Errorf("%s has %d bytes, %v; want %d", d.Path, n, err, bytesLong)
		return
	}
	f, err := os.Open(d.Path)
	s.ok(err)
	defer f.Close()
	have := make([]byte, bytesLong)
	if _, err := f.ReadAt(have, 0); err != nil {
		s.Errorf("%s cannot be read: %v", d.Path, err)
		return
	}
	want := make([]byte, bytesLong)
	for at, text := range texts {
		copy(want[at:], text)
	}
	if bytes.Equal(have, want) {
		return
	}
	for i := range have {
		if have[i] != want[i] {
			s.Errorf("%s has %q at %d, want %q", d.Path, have[i:min(i+24, len(have))], i,
				strings.TrimRight(string(want[i:min(i+24, len(want))]), "\x00"))
			return
		}
	}
}
