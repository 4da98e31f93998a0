package volumetest

import (
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// theDeviceHasTheData: written data is there when the volume is attached again, and after a
// restart, which must find the device in use.
func theDeviceHasTheData(s *suite) {
	v := s.create("v")
	d := s.attach(v.ID)
	s.has(d, size, nil)
	end := int64(size - 4)
	texts := map[int64]string{0: "first", 1 << 20: "middle", end: "last"}
	for at, text := range texts {
		s.put(d, at, text)
	}
	if again := s.attach(v.ID); !again.Same(d) || again.ReadOnly {
		s.Errorf("a repeated Attach made %+v beside %+v", again, d)
	}
	s.owned(d, v.ID)
	s.reopen()
	if a, ok, err := s.Attached(v.ID); err != nil || !ok || !a.Device.Same(d) {
		s.Errorf("after a restart %+v is attached, %v, %v; want %+v", a, ok, err, d)
	}
	s.owned(d, v.ID)
	s.has(d, size, texts)
	s.ok(s.Refresh(s.Context(), v.ID))
	s.ok(s.RestoreDevices(s.Context(), v.ID))
	for range 2 {
		s.detach(v.ID)
	}
	if id, ok, err := s.Owns(d); ok || err != nil {
		s.Errorf("a device that was released belongs to %q, %v, %v", id, ok, err)
	}
	s.has(s.attach(v.ID), size, texts)
}

// sizesAreAsToldBefore: a volume has exactly the requested size, if Sizes permits that size.
func sizesAreAsToldBefore(s *suite) {
	can := s.Sizes()
	if can.Fine <= 0 || can.Step < can.Fine || can.Step%can.Fine != 0 || can.Most < size || size%can.Fine != 0 {
		s.Fatalf("it makes volumes of %+v, and not of %d bytes", can, size)
	}
	asked := size + can.Fine
	v := s.create("v", func(spec *volume.Spec) { spec.Size = asked })
	s.has(s.attach(v.ID), asked, nil)
	grown, err := s.Expand(s.Context(), v.ID, asked+can.Fine)
	s.ok(err)
	if v.Size != asked || grown.Size != asked+can.Fine {
		s.Errorf("sizes %d and %d instead of %d and %d", v.Size, grown.Size, asked, asked+can.Fine)
	}
	s.has(s.attach(v.ID), asked+can.Fine, nil)
	odds := []int64{0, -can.Fine, can.Most + can.Fine}
	if can.Fine > 1 {
		odds = append(odds, size+can.Fine/2)
	}
	for _, odd := range odds {
		_, err := s.try("odd", func(spec *volume.Spec) { spec.Size = odd })
		s.refused(fmt.Sprintf("a volume of %d bytes is made", odd), err, fault.OutOfRange)
	}
	if can.Fine > 1 {
		_, err = s.Expand(s.Context(), v.ID, asked+can.Fine+1)
		s.refused("a volume grows by one byte", err, fault.OutOfRange)
	}
	s.has(s.attach(v.ID), asked+can.Fine, nil)
}

// volumesAreApart: each volume has its own device and data.
func volumesAreApart(s *suite) {
	a, b := s.create("a"), s.create("b")
	da, db := s.attach(a.ID), s.attach(b.ID)
	if da.Same(db) {
		s.Fatalf("two volumes have one device: %+v", da)
	}
	s.put(da, 0, "a")
	s.put(db, 0, "b")
	s.owned(da, a.ID)
	s.owned(db, b.ID)
	s.detach(a.ID)
	s.has(db, size, map[int64]string{0: "b"})
	s.ok(s.Delete(s.Context(), a.ID))
	s.has(db, size, map[int64]string{0: "b"})
	// Deleted data must not be readable.
	s.has(s.attach(s.create("a").ID), size, nil)
}

// inUseIsLeftAlone: a volume whose device somebody holds is neither detached nor destroyed.
func inUseIsLeftAlone(s *suite) {
	v := s.create("v")
	d := s.attach(v.ID)
	s.put(d, 0, "data")
	f, err := os.OpenFile(d.Path, os.O_RDWR|os.O_EXCL, 0)
	s.ok(err)
	defer f.Close()
	s.refused("a device in use is released", s.Detach(s.Context(), v.ID), fault.State)
	s.refused("a volume in use is destroyed", s.Delete(s.Context(), v.ID), fault.State)
	s.reopen()
	s.refused("a volume in use is destroyed after a restart", s.Delete(s.Context(), v.ID), fault.State)
	if got, err := s.Get(v.ID); err != nil || got.ID != v.ID {
		s.Errorf("it is %+v, %v", got, err)
	}
	s.has(d, size, map[int64]string{0: "data"})
	if _, err := f.WriteAt([]byte("more"), 4096); err != nil {
		s.Error(err)
	}
	s.ok(f.Sync())
	s.ok(f.Close())
	s.detach(v.ID)
	s.has(s.attach(v.ID), size, map[int64]string{0: "data", 4096: "more"})
}

// readOnlyDevices: read-only devices take no writes and show what was written.
func readOnlyDevices(s *suite) {
	v := s.create("v")
	_, err := s.AttachReadOnly(s.Context(), v.ID)
	s.refused("a volume that is not attached has a read-only device", err, fault.State)
	d := s.attach(v.ID)
	s.put(d, 0, "data")
	r, err := s.AttachReadOnly(s.Context(), v.ID)
	s.ok(err)
	if r.Same(d) || !r.ReadOnly || !mounter.ReadOnlyDevice(r) {
		s.Errorf("%+v is to be read-only, beside %+v", r, d)
	}
	s.owned(r, v.ID)
	if err := write(r, 0, "bad"); err == nil {
		s.Error("a read-only device took a write")
	}
	s.has(r, size, map[int64]string{0: "data"})
	s.ok(s.DetachReadOnly(s.Context(), v.ID, []mounter.Device{r}))
	s.has(r, size, map[int64]string{0: "data"})
	s.owned(r, v.ID)
	pod, err := s.ForPod(s.Context(), v.ID, r)
	s.ok(err)
	s.ok(s.DetachReadOnly(s.Context(), v.ID, []mounter.Device{pod}))
	s.has(pod, size, map[int64]string{0: "data"})
	s.owned(pod, v.ID)
	s.ok(s.DetachReadOnly(s.Context(), v.ID, nil))
	if id, ok, err := s.Owns(r); ok || err != nil {
		s.Errorf("a device that was released belongs to %q, %v, %v", id, ok, err)
	}
	s.put(d, 4096, "more")
	s.has(d, size, map[int64]string{0: "data", 4096: "more"})
	if _, err := s.AttachReadOnly(s.Context(), v.ID); err != nil {
		s.Error(err)
	}
	s.detach(v.ID) // releases both devices
}

// devicesForPods: a pod sees the data, and its device belongs to the volume.
func devicesForPods(s *suite) {
	v := s.create("v", func(spec *volume.Spec) { spec.Block = true })
	d := s.attach(v.ID)
	s.put(d, 0, "data")
	pod, err := s.ForPod(s.Context(), v.ID, d)
	s.ok(err)
	s.has(pod, size, map[int64]string{0: "data"})
	s.owned(pod, v.ID)
	if again, err := s.ForPod(s.Context(), v.ID, d); err != nil || !again.Same(pod) {
		s.Errorf("a pod gets %+v, and %+v when it asks again, %v", pod, again, err)
	}
	s.put(pod, 4096, "pod")
	s.has(d, size, map[int64]string{0: "data", 4096: "pod"})
	s.ok(s.RestoreDevices(s.Context(), v.ID))
	s.detach(v.ID)
	s.has(s.attach(v.ID), size, map[int64]string{0: "data", 4096: "pod"})
}

// itGrows: the volume grows with its device, if it has one. Nothing ever shrinks it.
func itGrows(s *suite) {
	v := s.create("v")
	d := s.attach(v.ID)
	s.put(d, 0, "data")
	grown := func(to int64) {
		s.Helper()
		got, err := s.Expand(s.Context(), v.ID, to)
		s.ok(err)
		if again, err := s.Get(v.ID); err != nil || got.Size != to || again.Size != to || !got.Facts.GrowDue {
			s.Errorf("it is %+v, and found as %+v, %v", got, again, err)
		}
	}
	grown(2 * size)
	s.has(d, 2*size, map[int64]string{0: "data"})
	s.put(d, 2*size-4, "tail")
	for _, less := range []int64{size, 0, -1} {
		if got, err := s.Expand(s.Context(), v.ID, less); err == nil && got.Size != 2*size {
			s.Errorf("of %d bytes, %d are said to be left", 2*size, got.Size)
		}
	}
	s.has(d, 2*size, map[int64]string{0: "data", 2*size - 4: "tail"})
	s.detach(v.ID)
	grown(3 * size)
	s.reopen()
	s.has(s.attach(v.ID), 3*size, map[int64]string{0: "data", 2*size - 4: "tail"})
}
