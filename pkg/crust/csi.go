package crust

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/pkg/crust/csialpha"
)

// NodeCapability says that a CSI node plugin can defer mounting and management
// to a runtime: a number that upstream's enumeration does not have.
const NodeCapability csi.NodeServiceCapability_RPC_Type = 2857

// MountInfo is what a runtime is to mount instead of the host.
type MountInfo struct {
	Source, Type string
	// Options of the mount; one without a value has an empty one.
	Options map[string]string
}

// overlay reads the alpha fields of m, which are unknown to its own type.
func overlay(m proto.Message, into proto.Message) error {
	if m == nil || !m.ProtoReflect().IsValid() {
		return nil
	}
	unknown := m.ProtoReflect().GetUnknown()
	if len(unknown) == 0 {
		return nil
	}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(unknown, into); err != nil {
		return fmt.Errorf("the alpha fields of %T: %w", m, err)
	}
	return nil
}

// add replaces the alpha fields of m that alpha has set.
func add(m proto.Message, alpha proto.Message) error {
	b, err := proto.Marshal(alpha)
	if err != nil {
		return err
	}
	mine := map[protowire.Number]bool{}
	for fields, i := alpha.ProtoReflect().Descriptor().Fields(), 0; i < fields.Len(); i++ {
		mine[fields.Get(i).Number()] = true
	}
	var kept []byte
	for rest := m.ProtoReflect().GetUnknown(); len(rest) > 0; {
		number, _, n := protowire.ConsumeField(rest)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if !mine[number] {
			kept = append(kept, rest[:n]...)
		}
		rest = rest[n:]
	}
	m.ProtoReflect().SetUnknown(append(kept, b...))
	return nil
}

// SupportedFilesystems is what the pod's runtime can mount, as the orchestrator
// says; empty for an orchestrator or runtime that knows nothing of CRUST.
func SupportedFilesystems(r *csi.NodePublishVolumeRequest) ([]string, error) {
	var a csialpha.NodePublishVolumeRequest
	err := overlay(r, &a)
	return a.GetRuntimeSupportedFilesystems(), err
}

// SetSupportedFilesystems adds that to a request.
func SetSupportedFilesystems(r *csi.NodePublishVolumeRequest, filesystems []string) error {
	return add(r, &csialpha.NodePublishVolumeRequest{RuntimeSupportedFilesystems: filesystems})
}

// MountInfoOf is what a driver answered that defers the mount; ok is false when
// it mounted the volume itself.
func MountInfoOf(r *csi.NodePublishVolumeResponse) (info MountInfo, ok bool, err error) {
	var a csialpha.NodePublishVolumeResponse
	if err := overlay(r, &a); err != nil {
		return MountInfo{}, false, err
	}
	m := a.GetRuntimeMountInfo()
	return MountInfo{Source: m.GetSource(), Type: m.GetType(), Options: m.GetOptions()}, m != nil, nil
}

// SetMountInfo adds that to an answer.
func SetMountInfo(r *csi.NodePublishVolumeResponse, i MountInfo) error {
	return add(r, &csialpha.NodePublishVolumeResponse{RuntimeMountInfo: &csialpha.FileSystemMountInfo{
		Source: i.Source, Type: i.Type, Options: i.Options,
	}})
}

// SupportsStats tells whether the pod's runtime answers for volumes' stats.
func SupportsStats(r *csi.NodeGetVolumeStatsRequest) (bool, error) {
	var a csialpha.NodeGetVolumeStatsRequest
	err := overlay(r, &a)
	return a.GetRuntimeSupportedStats(), err
}

// SetSupportsStats adds that to a request.
func SetSupportsStats(r *csi.NodeGetVolumeStatsRequest, yes bool) error {
	return add(r, &csialpha.NodeGetVolumeStatsRequest{RuntimeSupportedStats: yes})
}

// StatsSource is whom to ask the runtime about; empty for an answer that has
// the stats itself.
func StatsSource(r *csi.NodeGetVolumeStatsResponse) (string, error) {
	var a csialpha.NodeGetVolumeStatsResponse
	err := overlay(r, &a)
	return a.GetSource(), err
}

// SetStatsSource adds that to an answer.
func SetStatsSource(r *csi.NodeGetVolumeStatsResponse, source string) error {
	return add(r, &csialpha.NodeGetVolumeStatsResponse{Source: source})
}

// SupportsExpand tells whether the pod's runtime grows file systems.
func SupportsExpand(r *csi.NodeExpandVolumeRequest) (bool, error) {
	var a csialpha.NodeExpandVolumeRequest
	err := overlay(r, &a)
	return a.GetRuntimeSupportsExpand(), err
}

// SetSupportsExpand adds that to a request.
func SetSupportsExpand(r *csi.NodeExpandVolumeRequest, yes bool) error {
	return add(r, &csialpha.NodeExpandVolumeRequest{RuntimeSupportsExpand: yes})
}

// ExpandSource is for which volume the runtime is to grow the file system;
// empty when that was done.
func ExpandSource(r *csi.NodeExpandVolumeResponse) (string, error) {
	var a csialpha.NodeExpandVolumeResponse
	err := overlay(r, &a)
	return a.GetSource(), err
}

// SetExpandSource adds that to an answer.
func SetExpandSource(r *csi.NodeExpandVolumeResponse, source string) error {
	return add(r, &csialpha.NodeExpandVolumeResponse{Source: source})
}
