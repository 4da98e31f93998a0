package driver

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

// GetCapacity says "the size of the largest volume that CreateVolume would make".
func TestP06_WhatGetCapacityTellsCanBeMade(t *testing.T) {
	bad := 0
	var example, asked int64
	for left := int64(5 << 20); left < 1<<30; left += 123_457 {
		size, err := chooseSize(&csi.CapacityRange{RequiredBytes: offered(left, volume.FileSizes())}, volume.FileSizes(), 0, 0)
		if err == nil && size > left {
			bad++
			example, asked = left, size
		}
	}
	if bad > 0 {
		t.Errorf("in %d cases, for example with %d bytes left: %d are told, and %d are asked of the pool", bad, example, offered(example, volume.FileSizes()), asked)
	}
}
