package engine

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// C16, F07: a sandbox's file system without owners on disk takes the pod's group as an option.
func TestC16_AGroupIsAnOptionWhereFilesHaveNoOwners(t *testing.T) {
	group := uint32(4242)
	for _, c := range []struct {
		fs, given, want string
		group           *uint32
	}{
		{"vfat", "flush", "dmask=0007,flush,fmask=0117,gid=4242", &group},
		{"vfat", "fmask=0111,gid=4242", "dmask=0007,fmask=0111,gid=4242", &group},
		{"vfat", "gid=1", "", &group},
		{"vfat", "flush", "flush", nil},
		{"ext4", "discard", "discard", &group},
		{"xfs", "discard", "discard,nouuid", &group},
	} {
		o, err := mounter.ParseOptions([]string{c.given})
		if err != nil {
			t.Fatal(err)
		}
		got, err := Request{Type: c.fs, Options: o, Group: c.group}.SuperblockOptions()
		if c.want == "" {
			if !fault.Is(err, fault.Invalid) {
				t.Errorf("%s with %s: %v, %v", c.fs, c.given, got.List(), err)
			}
			continue
		}
		if err != nil || got.SuperblockString() != c.want {
			t.Errorf("%s with %s: %s, %v; want %s", c.fs, c.given, got.SuperblockString(), err, c.want)
		}
	}
}
