package poolhome

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

type one struct{ volume.Pool }

func (one) List() []volume.Volume { return []volume.Volume{{ID: "v"}} }

// What is known of a pool is known while its disk hangs. The look at the disk holds the
// lock meanwhile.
func TestMonitoring_WhatIsKnownOfAPoolNeedsNoDisk(t *testing.T) {
	p := &Pool{o: Options{Open: func() (volume.Pool, error) { return one{}, nil }}}
	if got := p.List(); got != nil {
		t.Errorf("before it was there: %v", got)
	}
	if err := p.Away(); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if got := p.List(); len(got) != 1 {
		t.Errorf("%v", got)
	}
}
