package qemu

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/internal/qmp"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// A call that runs beside Detach, or comes after it, opens no connection that nobody would close.
func TestNothingReconnectsAfterDetach(t *testing.T) {
	l := newLiar(t)
	l.box.b, l.box.end = &Backend{asked: map[*machine]chan struct{}{}}, func() {}
	before := l.box.q
	l.box.Detach()
	<-before.Gone()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, _, err := l.box.Stats(ctx, ofLiar); !errors.Is(err, errDetached) || errors.Is(err, qmp.ErrGone) {
		t.Errorf("Stats: %v", err)
	}
	if l.box.q != before {
		t.Error("it is connected again")
	}
}

// A guest names places that are stored, once for each volume: it must not fill the record.
func TestAPlaceThatAGuestNamesIsShort(t *testing.T) {
	l := newLiar(t)
	text := strings.Repeat("<", 1500)
	b, err := proto.Marshal(&guestv1.MountResponse{Device: text, Path: text})
	if err != nil {
		t.Fatal(err)
	}
	l.answer = func() ([]byte, error) { return b, nil }
	place, err := l.box.Publish(t.Context(), ofLiar)
	if err != nil || len(place.Device) > 300 || len(place.Path) > 300 {
		t.Errorf("%d and %d bytes, %v", len(place.Device), len(place.Path), err)
	}
}
