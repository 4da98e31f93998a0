package driver

import (
	"testing"

	"pgregory.net/rapid"
)

// 11.2: the reported capacity of a pool is never more than there is, and at most 1 % less. Small
// writes of a node do not change it.
func TestFleet_CapacityIsToldCoarsely(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Int64Min(0).Draw(t, "size")
		got := coarse(size)
		if got > size || got < size-size/100 || coarse(got) != got {
			t.Errorf("%d is told as %d", size, got)
		}
	})
	const pool = 400 << 30
	told := map[int64]bool{}
	for written := int64(0); written < 4<<30; written += 16 << 20 {
		told[coarse(pool-written)] = true
	}
	if len(told) > 4 {
		t.Errorf("4 GiB in steps of 16 MiB changed the capacity of a pool with 400 GiB left %d times", len(told))
	}
}
