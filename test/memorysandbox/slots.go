package memorysandbox

import (
	"context"
	"path"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// slot is what a slot shows: nothing, if it has no device.
type slot struct {
	device, sub string
	readOnly    bool
}

// slotsDir is where the sandboxes have their slots.
const slotsDir = "/slots/"

// slotsOf returns a sandbox's slots by name.
func (m *memory) slotsOf(id string) map[string]slot {
	if m.slots[id] == nil {
		m.slots[id] = map[string]slot{}
	}
	return m.slots[id]
}

// inSlot finds a file by its path in a slot.
func (m *memory) inSlot(id, file string) (*mounted, string) {
	name, rest, _ := strings.Cut(strings.TrimPrefix(file, slotsDir), "/"+crust.SlotVolume+"/")
	s := m.slots[id][name]
	d := m.boxes[id][s.device]
	if d == nil {
		return nil, ""
	}
	return &mounted{d.disk, d.readOnly || s.readOnly, d.pending}, path.Join(s.sub, rest)
}

func (b memoryBox) PrepareSlot(_ context.Context, name string) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.slotsOf(b.id)[name]; !ok {
		b.slotsOf(b.id)[name] = slot{}
	}
	return slotsDir + name, nil
}

func (b memoryBox) Bind(_ context.Context, name string, v sandbox.Volume, sub string, readOnly bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	want := slot{v.Device.Path, sub, readOnly}
	switch have, ok := b.slotsOf(b.id)[name]; {
	case !ok:
		return fault.New(fault.State, "there is no slot %s", name)
	case have != slot{} && have != want:
		return fault.New(fault.Exists, "the slot %s shows %+v", name, have)
	}
	b.slotsOf(b.id)[name] = want
	return nil
}

func (b memoryBox) Unbind(_ context.Context, name string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.slotsOf(b.id)[name]; ok {
		b.slotsOf(b.id)[name] = slot{}
	}
	return nil
}

// emptySlots empties the slots that show a device.
func (b memoryBox) emptySlots(device string) {
	for name, s := range b.slotsOf(b.id) {
		if s.device == device {
			b.slotsOf(b.id)[name] = slot{}
		}
	}
}
