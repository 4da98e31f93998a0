package crust

import (
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/pkg/crust/csialpha"
)

// AllowParameter of a StorageClass lets a pod's runtime mount the volumes, if it is "true".
const AllowParameter = "allowRuntimeAssistedMount"

// What an orchestrator adds to the volume context of NodePublishVolume.
const (
	// ContextKernel is "host" if the pod's runtime mounts with this node's own kernel (its sandboxes are mount namespaces), and
	// "guest" or absent otherwise.
	ContextKernel = "csi.crust.dev/runtimeKernel"
	// ContextHostUsers is "false" for a pod that has a user namespace.
	ContextHostUsers = "csi.crust.dev/hostUsers"
	// ContextGroupPolicy is the pod's fsGroupChangePolicy, absent if it has none.
	ContextGroupPolicy = "csi.storage.k8s.io/pod.fsGroupChangePolicy"
)

// NodeCapability says that a CSI node plugin can defer mounting and management to a runtime.
// Upstream's enumeration does not have the number.
const NodeCapability csi.NodeServiceCapability_RPC_Type = 2857

// MountInfo is what a runtime mounts instead of the host.
type MountInfo struct {
	Source, Type string
	// Options of the mount. A flag has an empty value. OptionMap makes them.
	Options map[string]string
}

// OptionMap makes MountInfo.Options of a list with one option in each string, as
// mounter.Options.List returns it. It keeps options of the mount (noatime), too.
func OptionMap(list []string) map[string]string {
	options := make(map[string]string, len(list))
	for _, option := range list {
		key, value, _ := strings.Cut(option, "=")
		options[key] = value
	}
	return options
}

// OptionList is the opposite of OptionMap. Its list is sorted. RuntimePublishVolume carries it, and
// mounter.ParseOptions parses it.
func OptionList(options map[string]string) []string {
	list := make([]string, 0, len(options))
	for key, value := range options {
		if value != "" {
			key += "=" + value
		}
		list = append(list, key)
	}
	slices.Sort(list)
	return list
}

// overlay decodes the alpha fields of m, which are unknown fields of its type.
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

// add replaces the alpha fields of m by those of alpha.
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

// SupportedFilesystems returns what the pod's runtime can mount, as the orchestrator reports it. It
// is empty if either does not support CRUST.
func SupportedFilesystems(r *csi.NodePublishVolumeRequest) ([]string, error) {
	var a csialpha.NodePublishVolumeRequest
	err := overlay(r, &a)
	return a.GetRuntimeSupportedFilesystems(), err
}

// SetSupportedFilesystems tells a driver what the pod's runtime can mount.
func SetSupportedFilesystems(r *csi.NodePublishVolumeRequest, filesystems []string) error {
	return add(r, &csialpha.NodePublishVolumeRequest{RuntimeSupportedFilesystems: filesystems})
}

// MountInfoOf returns the mount that a driver deferred; ok is false if the driver mounted the
// volume itself.
func MountInfoOf(r *csi.NodePublishVolumeResponse) (info MountInfo, ok bool, err error) {
	var a csialpha.NodePublishVolumeResponse
	if err := overlay(r, &a); err != nil {
		return MountInfo{}, false, err
	}
	m := a.GetRuntimeMountInfo()
	return MountInfo{Source: m.GetSource(), Type: m.GetType(), Options: m.GetOptions()}, m != nil, nil
}

// SetMountInfo answers that the driver deferred the mount.
func SetMountInfo(r *csi.NodePublishVolumeResponse, i MountInfo) error {
	return add(r, &csialpha.NodePublishVolumeResponse{RuntimeMountInfo: &csialpha.FileSystemMountInfo{
		Source: i.Source, Type: i.Type, Options: i.Options,
	}})
}

// SupportsStats tells whether the pod's runtime reports volumes' stats.
func SupportsStats(r *csi.NodeGetVolumeStatsRequest) (bool, error) {
	var a csialpha.NodeGetVolumeStatsRequest
	err := overlay(r, &a)
	return a.GetRuntimeSupportedStats(), err
}

// SetSupportsStats tells a driver whether the pod's runtime reports volumes' stats.
func SetSupportsStats(r *csi.NodeGetVolumeStatsRequest, yes bool) error {
	return add(r, &csialpha.NodeGetVolumeStatsRequest{RuntimeSupportedStats: yes})
}

// StatsSource returns the volume to query at the runtime; empty if the answer itself has the stats.
func StatsSource(r *csi.NodeGetVolumeStatsResponse) (string, error) {
	var a csialpha.NodeGetVolumeStatsResponse
	err := overlay(r, &a)
	return a.GetSource(), err
}

// SetStatsSource answers that the runtime has the stats of a volume. The source is that of the volume's
// MountInfo: a runtime does not know CSI's id.
func SetStatsSource(r *csi.NodeGetVolumeStatsResponse, source string) error {
	return add(r, &csialpha.NodeGetVolumeStatsResponse{Source: source})
}

// SupportsExpand tells whether the pod's runtime grows file systems.
func SupportsExpand(r *csi.NodeExpandVolumeRequest) (bool, error) {
	var a csialpha.NodeExpandVolumeRequest
	err := overlay(r, &a)
	return a.GetRuntimeSupportsExpand(), err
}

// SetSupportsExpand tells a driver whether the pod's runtime grows file systems.
func SetSupportsExpand(r *csi.NodeExpandVolumeRequest, yes bool) error {
	return add(r, &csialpha.NodeExpandVolumeRequest{RuntimeSupportsExpand: yes})
}

// ExpandSource returns the volume whose file system the runtime has to grow; empty if it is grown
// already.
func ExpandSource(r *csi.NodeExpandVolumeResponse) (string, error) {
	var a csialpha.NodeExpandVolumeResponse
	err := overlay(r, &a)
	return a.GetSource(), err
}

// SetExpandSource answers that the runtime has to grow the file system of a volume. The source is that
// of its MountInfo.
func SetExpandSource(r *csi.NodeExpandVolumeResponse, source string) error {
	return add(r, &csialpha.NodeExpandVolumeResponse{Source: source})
}
