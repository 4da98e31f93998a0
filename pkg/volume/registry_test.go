package volume

import (
	"errors"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

type sized struct {
	Pool
	sizes Sizes
}

func (sized) Name() string   { return "p" }
func (p sized) Sizes() Sizes { return p.sizes }

// The driver divides by them: a pool of another maker that does not set them is told at the start.
func TestARegistryRefusesSizesThatMakeNoSense(t *testing.T) {
	for _, s := range []Sizes{
		{}, {Step: 1 << 20, Most: 1 << 40}, {Fine: 4096, Most: 1 << 40}, {Step: 1 << 20, Fine: 4096},
		{Step: 5000, Fine: 4096, Most: 1 << 40},
		{Step: -4096, Fine: -4096, Most: 1 << 40}, {Step: 4096, Fine: 8192, Most: 1 << 40}, {Step: 4096, Fine: 4096, Most: 4095},
	} {
		if _, err := NewRegistry(nil, sized{sizes: s}); fault.KindOf(err) != fault.Invalid {
			t.Errorf("%+v: %v", s, err)
		}
	}
	if _, err := NewRegistry(nil, sized{sizes: FileSizes()}); err != nil {
		t.Error(errors.Unwrap(err), err)
	}
}
