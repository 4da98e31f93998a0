// Package memorysandbox has the smallest backend of a CRUST server: its file systems are maps. It shows that a kind of sandbox
// is a package.
package memorysandbox

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

type memory struct {
	late    bool // volumes are mounted when start is called
	mu      sync.Mutex
	disks   map[[32]byte]*disk             // by the first MiB of the device
	boxes   map[string]map[string]*mounted // by sandbox and device
	devices map[string]*held
	slots   map[string]map[string]slot // by sandbox and name
}

type disk struct {
	files map[string]string
	size  int64
}

type mounted struct {
	*disk
	readOnly, pending bool
}

// held is a device that sandboxes have.
type held struct {
	*os.File
	users int
}

// hold keeps others from the device.
func (m *memory) hold(d mounter.Device) error {
	if m.devices[d.Path] == nil {
		f, err := mounter.Hold(d)
		if err != nil {
			return err
		}
		m.devices[d.Path] = &held{File: f}
	}
	m.devices[d.Path].users++
	return nil
}

func (m *memory) release(device string) error {
	h := m.devices[device]
	if h.users--; h.users > 0 {
		return nil
	}
	delete(m.devices, device)
	return h.Close()
}

// start starts a container in a sandbox.
func (m *memory) start(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.boxes[id] {
		d.pending = false
	}
}

func (m *memory) Kind() string                                             { return "memory" }
func (m *memory) Registration(*crustv1alpha1.RegisterSandboxRequest) any   { return struct{}{} }
func (m *memory) Capabilities() []crust.Capability                         { return sandbox.BasicCapabilities(false) }
func (m *memory) FileSystems(context.Context) ([]string, error)            { return fstype.Formats(), nil }
func (m *memory) Mounts(name string) bool                                  { return slices.Contains(fstype.Formats(), name) }
func (m *memory) Grows(string) bool                                        { return true }
func (m *memory) Process(context.Context, sandbox.Spec) (pid int, e error) { return 0, nil }
func (m *memory) Close() error                                             { return nil }

func (m *memory) Forget(spec sandbox.Spec) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.boxes, spec.ID)
	delete(m.slots, spec.ID)
	return nil
}

func (m *memory) Open(_ context.Context, o sandbox.Opening) (sandbox.Sandbox, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boxes[o.ID] == nil {
		m.boxes[o.ID] = map[string]*mounted{}
	}
	return memoryBox{m, o.ID}, nil
}

type memoryBox struct {
	*memory
	id string
}

func (b memoryBox) MountNamespace() string { return "" }
func (b memoryBox) Detach()                {}
func (b memoryBox) Close() error           { return b.Forget(sandbox.Spec{ID: b.id}) }

func (b memoryBox) Publish(_ context.Context, v sandbox.Volume) (sandbox.Place, error) {
	f, err := os.Open(v.Device.Path)
	if err != nil {
		return sandbox.Place{}, err
	}
	defer f.Close()
	head := make([]byte, 1<<20) // every file system has its identity here
	if _, err := f.Read(head); err != nil {
		return sandbox.Place{}, err
	}
	if !slices.ContainsFunc(head, func(c byte) bool { return c != 0 }) {
		return sandbox.Place{}, fault.New(fault.State, "%s is blank", v.Device.Path)
	}
	size, err := mounter.DeviceSize(v.Device)
	if err != nil {
		return sandbox.Place{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	id := sha256.Sum256(head)
	if b.disks[id] == nil {
		b.disks[id] = &disk{map[string]string{}, size}
	}
	d := b.boxes[b.id][v.Device.Path]
	if d == nil {
		if err := b.hold(v.Device); err != nil {
			return sandbox.Place{}, err
		}
		d = &mounted{b.disks[id], v.ReadOnly, b.late}
		b.boxes[b.id][v.Device.Path] = d
	}
	return sandbox.Place{Device: v.Device.Path, Path: "/" + v.Serial(), Pending: d.pending}, nil
}

func (b memoryBox) Unpublish(_ context.Context, v sandbox.Volume) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.boxes[b.id][v.Device.Path]
	delete(b.boxes[b.id], v.Device.Path)
	if d == nil {
		return nil
	}
	b.emptySlots(v.Device.Path)
	return b.release(v.Device.Path)
}

func (b memoryBox) find(v sandbox.Volume) (*mounted, error) {
	if d := b.boxes[b.id][v.Device.Path]; d != nil {
		return d, nil
	}
	return nil, fault.New(fault.NotFound, "%s is not in sandbox %s", v.Device.Path, b.id)
}

func (b memoryBox) running(v sandbox.Volume) (*mounted, error) {
	d, err := b.find(v)
	if err == nil && d.pending {
		err = fault.New(fault.Unavailable, "%s is mounted when a container of sandbox %s starts", v.Device.Path, b.id)
	}
	return d, err
}

func (b memoryBox) Stats(_ context.Context, v sandbox.Volume) (mounter.Usage, string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.running(v)
	if err != nil {
		return mounter.Usage{}, "", err
	}
	used := int64(4096)
	for f := range maps.Values(d.files) {
		used += int64(len(f))
	}
	return mounter.Usage{TotalBytes: d.size, UsedBytes: used, AvailableBytes: d.size - used}, "", nil
}

func (b memoryBox) Expand(_ context.Context, v sandbox.Volume, size int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.running(v)
	if err == nil {
		d.size = size
	}
	return err
}

func (b memoryBox) Resolve(_ context.Context, v sandbox.Volume, sub string) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, err := b.find(v)
	if err != nil {
		return "", err
	}
	// Every directory is there, unless a file is.
	for dir := path.Dir(sub); dir != "."; dir = path.Dir(dir) {
		if _, isFile := d.files[dir]; isFile {
			return "", fmt.Errorf("%s: %w", dir, fs.ErrExist)
		}
	}
	return strings.TrimSuffix("/"+v.Serial()+"/"+sub, "/"), nil
}

// at finds a file by its path in a sandbox.
func (m *memory) at(in *crustv1alpha1.Sandbox, path string) (*mounted, string, error) {
	if d, name := m.inSlot(in.GetSandboxId(), path); d != nil && strings.HasPrefix(path, slotsDir) {
		return d, name, nil
	}
	for device, d := range m.boxes[in.GetSandboxId()] {
		root := "/" + sandbox.Volume{Device: mounter.Device{Path: device}}.Serial() + "/"
		if name, ok := strings.CutPrefix(path, root); ok && !d.pending {
			return d, name, nil
		}
	}
	return nil, "", fmt.Errorf("%s: %w", path, fs.ErrNotExist)
}
