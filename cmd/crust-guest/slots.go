package main

import (
	"context"
	"os"

	"github.com/crust-csi/crust-csi/internal/guestdisks"
	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

func (s *server) PrepareSlot(_ context.Context, r *guestv1.PrepareSlotRequest) (*guestv1.PrepareSlotResponse, error) {
	s.slots.Lock()
	defer s.slots.Unlock()
	path, err := s.slots.Prepare(r.GetSlot())
	return &guestv1.PrepareSlotResponse{Path: path}, err
}

func (s *server) Bind(_ context.Context, r *guestv1.BindRequest) (*guestv1.BindResponse, error) {
	s.slots.Lock()
	defer s.slots.Unlock()
	return &guestv1.BindResponse{}, s.mounted(r.GetSerial(), func(st *mounter.State, _ mounter.Device) error {
		return engine.Within(st, r.GetSubPath(), func(f *os.File) error {
			return s.slots.Bind(r.GetSlot(), f, r.GetReadOnly())
		})
	})
}

func (s *server) Unbind(_ context.Context, r *guestv1.UnbindRequest) (*guestv1.UnbindResponse, error) {
	s.slots.Lock()
	defer s.slots.Unlock()
	return &guestv1.UnbindResponse{}, s.slots.Unbind(r.GetSlot())
}

// empty takes a volume out of all slots.
func (s *server) empty(serial string) error {
	all, err := guestdisks.All()
	if err != nil {
		return err
	}
	s.slots.Lock()
	defer s.slots.Unlock()
	for name, have := range all {
		if have != serial {
			continue
		}
		d, err := mounter.FindDevice("/dev/" + name)
		if fault.Is(err, fault.NotFound) {
			return nil // unplugged just now
		}
		if err != nil {
			return err
		}
		return s.slots.EmptyAll(d)
	}
	return nil
}
