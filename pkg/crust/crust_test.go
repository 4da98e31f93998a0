package crust

import (
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

func TestC21_WhoMountsAVolume(t *testing.T) {
	all := PodVolume{
		Socket: "/run/crust/crust.sock", Allowed: true, Exclusive: true, NodeDefers: true, Filesystems: []string{"ext4"},
		Capabilities: []Capability{
			crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS,
			crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH,
			crustv1alpha1.RuntimeCapability_RPC_SUBPATH, crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT,
		},
	}
	without := func(c Capability) func(*PodVolume) {
		return func(v *PodVolume) {
			v.Capabilities = slices.DeleteFunc(slices.Clone(v.Capabilities), func(have Capability) bool { return have == c })
		}
	}
	for name, c := range map[string]struct {
		change []func(*PodVolume)
		want   bool
		why    string
	}{
		"story 1: everything is there": {[]func(*PodVolume){func(v *PodVolume) {
			v.Group, v.SubPath, v.Label, v.LabelOnMount = true, true, true, true
		}}, true, "ext4"},
		"story 2: no fsGroup": {[]func(*PodVolume){without(crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH),
			func(v *PodVolume) { v.Group = true }}, false, "fsGroup"},
		"story 2: not this policy": {[]func(*PodVolume){without(crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS),
			func(v *PodVolume) { v.Group, v.GroupPolicy = true, "Always" }}, false, "Always"},
		"story 2: the other policy": {[]func(*PodVolume){without(crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS),
			func(v *PodVolume) { v.Group, v.GroupPolicy = true, "OnRootMismatch" }}, true, ""},
		"story 2: no subPath": {[]func(*PodVolume){without(crustv1alpha1.RuntimeCapability_RPC_SUBPATH),
			func(v *PodVolume) { v.SubPath = true }}, false, "subPath"},
		"story 2: no subPath, none asked": {[]func(*PodVolume){without(crustv1alpha1.RuntimeCapability_RPC_SUBPATH)}, true, ""},
		"story 2: no label on mount": {[]func(*PodVolume){without(crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT),
			func(v *PodVolume) { v.Label, v.LabelOnMount = true, true }}, false, "mount option"},
		"story 2: no relabelling":             {[]func(*PodVolume){func(v *PodVolume) { v.Label = true }}, false, "relabelling"},
		"story 3: no socket":                  {[]func(*PodVolume){func(v *PodVolume) { v.Socket = "" }}, false, "RuntimeClass"},
		"story 4: the class":                  {[]func(*PodVolume){func(v *PodVolume) { v.Allowed = false }}, false, "StorageClass"},
		"story 4: the driver":                 {[]func(*PodVolume){func(v *PodVolume) { v.NodeDefers = false }}, false, "driver"},
		"story 5: no file system at all":      {[]func(*PodVolume){func(v *PodVolume) { v.Filesystems = nil }}, false, "no file system"},
		"a volume that others may have":       {[]func(*PodVolume){func(v *PodVolume) { v.Exclusive = false }}, false, "ReadWriteOncePod"},
		"one that this pod only reads":        {[]func(*PodVolume){func(v *PodVolume) { v.Exclusive, v.ReadOnly = false, true }}, true, ""},
		"a raw block device is never mounted": {[]func(*PodVolume){func(v *PodVolume) { v.Block = true }}, false, "block"},
	} {
		t.Run(name, func(t *testing.T) {
			v := all
			for _, f := range c.change {
				f(&v)
			}
			if d := Decide(v); d.Defer != c.want || !strings.Contains(d.Why, c.why) {
				t.Errorf("%+v", d)
			}
		})
	}
}

// The field numbers are fixed. The fields survive on upstream's messages beside unknown fields.
func TestAlphaFieldsOnTheWire(t *testing.T) {
	r := &csi.NodePublishVolumeRequest{VolumeId: "v"}
	foreign := protowire.AppendVarint(protowire.AppendTag(nil, 99999, protowire.VarintType), 7)
	r.ProtoReflect().SetUnknown(foreign)
	for range 2 { // again: the field is replaced
		if err := SetSupportedFilesystems(r, []string{"ext4", "xfs"}); err != nil {
			t.Fatal(err)
		}
	}
	b, err := proto.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[protowire.Number]int{}
	for rest := b; len(rest) > 0; {
		number, _, n := protowire.ConsumeField(rest)
		numbers[number]++
		rest = rest[n:]
	}
	if numbers[285701] != 2 || numbers[99999] != 1 {
		t.Errorf("fields on the wire: %v", numbers)
	}
	again := &csi.NodePublishVolumeRequest{}
	if err := proto.Unmarshal(b, again); err != nil {
		t.Fatal(err)
	}
	if got, err := SupportedFilesystems(again); err != nil || !slices.Equal(got, []string{"ext4", "xfs"}) || again.GetVolumeId() != "v" {
		t.Errorf("%v %v", got, err)
	}
	resp := &csi.NodePublishVolumeResponse{}
	if _, ok, err := MountInfoOf(resp); ok || err != nil {
		t.Errorf("an empty answer: %v %v", ok, err)
	}
	if err := SetMountInfo(resp, MountInfo{Source: "/dev/loop0", Type: "ext4", Options: map[string]string{"nobarrier": ""}}); err != nil {
		t.Fatal(err)
	}
	if i, ok, err := MountInfoOf(resp); !ok || err != nil || i.Source != "/dev/loop0" || i.Type != "ext4" || len(i.Options) != 1 {
		t.Errorf("%+v %v %v", i, ok, err)
	}
}

// Malformed alpha fields are an error, never a crash.
func FuzzAlphaFields(f *testing.F) {
	f.Add([]byte{0xca, 0xc3, 0x8b, 0x01, 4, 'e', 'x', 't', '4'})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := &csi.NodePublishVolumeRequest{}
		if proto.Unmarshal(b, r) != nil {
			return
		}
		list, err := SupportedFilesystems(r)
		if err != nil {
			return
		}
		if err := SetSupportedFilesystems(r, list); err != nil {
			t.Fatal(err)
		}
		if again, err := SupportedFilesystems(r); err != nil || !slices.Equal(again, list) {
			t.Fatalf("%q %v, was %q", again, err, list)
		}
	})
}
