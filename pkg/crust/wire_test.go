package crust

import (
	"os"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Other people's orchestrators and drivers are built with these numbers. They are literals here, so
// that a change of one must change this test.
func TestTheNumbersOnTheWire(t *testing.T) {
	if NodeCapability != 2857 {
		t.Errorf("the capability of a node plugin is %d, not 2857", NodeCapability)
	}
	if SubPathCapability != 285702 || ContextSubPaths != "csi.crust.dev/subPaths" {
		t.Errorf("sub-paths are the capability %d and the attribute %s", SubPathCapability, ContextSubPaths)
	}
	for name, c := range map[string]struct {
		message proto.Message
		set     func(m proto.Message) error
		want    []byte
	}{
		"NodePublishVolumeRequest": {
			&csi.NodePublishVolumeRequest{},
			func(m proto.Message) error {
				return SetSupportedFilesystems(m.(*csi.NodePublishVolumeRequest), []string{"xfs"})
			},
			protowire.AppendString(protowire.AppendTag(nil, 285701, protowire.BytesType), "xfs"),
		},
		"NodePublishVolumeResponse": {
			&csi.NodePublishVolumeResponse{},
			func(m proto.Message) error {
				return SetMountInfo(m.(*csi.NodePublishVolumeResponse),
					MountInfo{Source: "s", Type: "t", Options: map[string]string{"k": "v"}})
			},
			protowire.AppendString(protowire.AppendTag(nil, 285702, protowire.BytesType), "\x0a\x01s\x12\x01t\x1a\x06\x0a\x01k\x12\x01v"),
		},
		"NodeGetVolumeStatsRequest": {
			&csi.NodeGetVolumeStatsRequest{},
			func(m proto.Message) error { return SetSupportsStats(m.(*csi.NodeGetVolumeStatsRequest), true) },
			protowire.AppendVarint(protowire.AppendTag(nil, 285703, protowire.VarintType), 1),
		},
		"NodeGetVolumeStatsResponse": {
			&csi.NodeGetVolumeStatsResponse{},
			func(m proto.Message) error { return SetStatsSource(m.(*csi.NodeGetVolumeStatsResponse), "s") },
			protowire.AppendString(protowire.AppendTag(nil, 285704, protowire.BytesType), "s"),
		},
		"NodeExpandVolumeRequest": {
			&csi.NodeExpandVolumeRequest{},
			func(m proto.Message) error { return SetSupportsExpand(m.(*csi.NodeExpandVolumeRequest), true) },
			protowire.AppendVarint(protowire.AppendTag(nil, 285705, protowire.VarintType), 1),
		},
		"NodeExpandVolumeResponse": {
			&csi.NodeExpandVolumeResponse{},
			func(m proto.Message) error { return SetExpandSource(m.(*csi.NodeExpandVolumeResponse), "s") },
			protowire.AppendString(protowire.AppendTag(nil, 285706, protowire.BytesType), "s"),
		},
	} {
		if err := c.set(c.message); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := proto.Marshal(c.message); err != nil || string(got) != string(c.want) {
			t.Errorf("%s is %x on the wire, not %x (%v)", name, got, c.want, err)
		}
	}
}

// The baseline of `buf breaking` has everything that others depend on.
func TestTheBaselineOfTheProtocolsIsWhole(t *testing.T) {
	b, err := os.ReadFile("v1alpha1/baseline.binpb")
	if err != nil {
		t.Fatal(err)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(b, &set); err != nil {
		t.Fatal(err)
	}
	var names []string
	numbers := map[string][]int32{}
	for _, f := range set.GetFile() {
		names = append(names, f.GetName())
		for _, m := range f.GetMessageType() {
			for _, field := range m.GetField() {
				numbers[m.GetName()] = append(numbers[m.GetName()], field.GetNumber())
			}
		}
	}
	for _, want := range []string{"csialpha/csialpha.proto", "v1alpha1/crust.proto", "v1alpha1/sandbox.proto"} {
		if !slices.Contains(names, want) {
			t.Errorf("it has %v, and not %s", names, want)
		}
	}
	if got := numbers["NodeExpandVolumeResponse"]; !slices.Equal(got, []int32{285706}) {
		t.Errorf("NodeExpandVolumeResponse has the fields %v", got)
	}
}
