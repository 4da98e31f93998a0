package memorysandbox

import (
	"io/fs"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/crust/crusttest"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func TestBackendInMemory(t *testing.T) {
	crusttest.TestBackend(t, kit(newMemory()))
}

// C12: a runtime that mounts when its container starts.
func TestBackendInMemoryThatMountsLate(t *testing.T) {
	m := newMemory()
	m.late = true
	k := kit(m)
	k.Start = func(_ testing.TB, id string) { m.start(id) }
	crusttest.TestBackend(t, k)
}

func newMemory() *memory {
	return &memory{disks: map[[32]byte]*disk{}, boxes: map[string]map[string]*mounted{}, devices: map[string]*held{},
		slots: map[string]map[string]slot{}}
}

func kit(m *memory) crusttest.Kit {
	return crusttest.Kit{
		Open:    func(testing.TB, string, string) sandbox.Backend { return m },
		Sandbox: func(testing.TB) *crustv1alpha1.RegisterSandboxRequest { return &crustv1alpha1.RegisterSandboxRequest{} },
		Write: func(_ *sandbox.Server, in *crustv1alpha1.Sandbox, path, text string) error {
			m.mu.Lock()
			defer m.mu.Unlock()
			d, name, err := m.at(in, path)
			if err == nil && d.readOnly {
				err = fs.ErrPermission
			}
			if err == nil {
				d.files[name] = text
			}
			return err
		},
		Read: func(_ *sandbox.Server, in *crustv1alpha1.Sandbox, path string) (string, error) {
			m.mu.Lock()
			defer m.mu.Unlock()
			d, name, err := m.at(in, path)
			if err != nil {
				return "", err
			}
			text, ok := d.files[name]
			if !ok {
				err = fs.ErrNotExist
			}
			return text, err
		},
		Patience: time.Minute,
	}
}
