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
	for left := int64(0); left < 1<<30; left += 123_457 {
		told := offered(left, volume.FileSizes())
		if told == 0 && left < 1<<20 {
			continue // no volume is that small
		}
		size, err := chooseSize(&csi.CapacityRange{RequiredBytes: told}, volume.FileSizes(), 0, 0)
		if err != nil || size > left {
			bad++
			example, asked = left, size
		}
	}
	if bad > 0 {
		t.Errorf("in %d cases, for example with %d bytes left: %d are told, and %d are asked of the pool", bad, example,
			offered(example, volume.FileSizes()), asked)
	}
}
