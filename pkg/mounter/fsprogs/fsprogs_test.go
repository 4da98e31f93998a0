package fsprogs

import (
	"strings"
	"testing"
)

// arm64 has kernels with pages of 64 KiB. What they format goes to others, too.
func TestABtrfsHasTheSameSectorsOnEveryKernel(t *testing.T) {
	if args := strings.Join(specs["btrfs"].mkfs, " "); !strings.Contains(args, "-s 4096") {
		t.Error(args)
	}
}
