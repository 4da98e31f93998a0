package node

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// D09: a file system that never grows is given no larger device, by nobody, and a pod is not told of room that it cannot use. Its claim
// keeps no pod from starting.
func TestD09_WhatNeverGrows(t *testing.T) {
	t.Parallel()
	for _, fs := range filesystems {
		if fstype.Of(fs).Grows() {
			continue
		}
		t.Run(fs, func(t *testing.T) {
			for _, where := range []string{"controller", "node"} {
				n := testnode.New(t, "", "--expansion", where)
				v, target := up(t, n, "v", csiclient.Volume{FSType: fs})
				write(t, target+"/data", "kept")
				var err error
				want := codes.OutOfRange
				if where == "node" {
					_, err = expandTo(t, n, v.ID, target, 2*size)
					want = codes.FailedPrecondition
				} else {
					_, err = n.Client.Expand(ctxOf(t), v.ID, 2*size, target)
				}
				refused(t, err, want, v.ID, "never grows", "copy the data")
				if got := imageSize(t, n, v.ID); got != size {
					t.Errorf("by the %s, its file has %d bytes", where, got)
				}
				source := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
					Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.ID}}}
				use := csiclient.Volume{FSType: fs}
				_, err = n.Client.Create(ctxOf(t), "larger", 2*size, use, nil, source)
				refused(t, err, codes.OutOfRange, "its origin has", "never grows")
				copied, err := n.Client.Create(ctxOf(t), "copy", size, use, nil, source)
				ok(t, err)
				use.ID = copied.GetVolumeId()
				ok(t, n.Client.Stage(ctxOf(t), use))
				beside := n.Target("copy")
				ok(t, n.Client.Publish(ctxOf(t), use, beside, false))
				if got := read(t, beside+"/data"); got != "kept" {
					t.Errorf("the copy has %q", got)
				}
				down(t, n, use.ID, beside)
				down(t, n, v.ID, target)
			}
		})
	}
}
