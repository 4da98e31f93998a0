package crust_test

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/crust"
)

// Decide who mounts a volume: once for a sandbox that can do everything the pod asks for, once for
// one that cannot apply the pod's group.
func ExampleDecide() {
	v := crust.PodVolume{
		Socket: "/run/crust.sock", Allowed: true, NodeDefers: true, Exclusive: true, Filesystems: []string{"ext4"},
	}
	d := crust.Decide(v)
	fmt.Printf("%v: %s\n", d.Defer, d.Why)
	v.Group, v.GroupPolicy = true, "Always"
	d = crust.Decide(v)
	fmt.Printf("%v: %s\n", d.Defer, d.Why)
	// Output:
	// true: the runtime can mount ext4 and do all that the pod asks for
	// false: the runtime does not do fsGroup with policy Always
}

// A CSI driver leaves a mount to a runtime in its NodePublishVolume.
func ExampleSetMountInfo() {
	req, resp := &csi.NodePublishVolumeRequest{VolumeId: "data"}, &csi.NodePublishVolumeResponse{}
	if err := crust.SetSupportedFilesystems(req, []string{"ext4", "xfs"}); err != nil { // the orchestrator does it
		panic(err)
	}
	runtime, err := crust.SupportedFilesystems(req)
	if err != nil {
		panic(err)
	}
	if len(runtime) > 0 {
		err = crust.SetMountInfo(resp, crust.MountInfo{Source: "/dev/loop7", Type: "ext4", Options: crust.OptionMap([]string{"noatime"})})
	}
	info, deferred, _ := crust.MountInfoOf(resp) // the orchestrator again
	fmt.Println(runtime, err, deferred, info.Source, info.Type)
	// Output: [ext4 xfs] <nil> true /dev/loop7 ext4
}
