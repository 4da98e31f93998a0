package crust

import (
	"fmt"
	"slices"
	"strings"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Capability is one of RuntimeCapability.RPC.
type Capability = crustv1alpha1.RuntimeCapability_RPC_Type

// PodVolume is what the orchestrator knows of one volume of one pod when it decides who mounts it.
type PodVolume struct {
	// Socket of the pod's RuntimeClass; empty if it has none.
	Socket string
	// Allowed by the StorageClass (allowRuntimeAssistedMount).
	Allowed bool
	// NodeDefers: the CSI node plugin has the capability to defer.
	NodeDefers bool
	// Capabilities and Filesystems are the runtime's answers.
	Capabilities []Capability
	Filesystems  []string

	Block bool // the pod uses it as a raw block device
	// Exclusive: no other pod can use it at the same time (ReadWriteOncePod).
	Exclusive bool
	// ReadOnly: the pod only reads it (the claim's readOnly, or ReadOnlyMany).
	ReadOnly bool
	// Group: the pod has an fsGroup. GroupPolicy is its fsGroupChangePolicy.
	Group       bool
	GroupPolicy string
	SubPath     bool // a container mounts a subPath
	// Label: the pod has a SELinux label for it. LabelOnMount: it is passed as a mount option.
	Label, LabelOnMount bool
}

// Decision is who mounts a volume.
type Decision struct {
	// Defer: NodePublishVolume carries the runtime's file systems. (The driver still mounts the
	// volume itself if its file system is not among them.)
	Defer bool
	// Why is the reason in words, for events and logs.
	Why string
}

// Decide follows the stories of KEP-2857. It defers the volume if the sandbox can do everything
// that the pod asks for. Otherwise the CSI driver mounts it.
func Decide(v PodVolume) Decision {
	no := func(format string, args ...any) Decision { return Decision{Why: fmt.Sprintf(format, args...)} }
	has := func(c Capability) bool { return slices.Contains(v.Capabilities, c) }
	switch {
	case v.Block:
		return no("the pod uses the volume as a raw block device; there is nothing to mount")
	case v.Socket == "":
		return no("the pod's RuntimeClass names no CRUST socket")
	case !v.Allowed:
		return no("the volume's StorageClass does not allow runtime-assisted mounts")
	case !v.Exclusive && !v.ReadOnly:
		return no("another pod may use the volume at the same time; what a sandbox writes to is one pod's: it takes the access mode " +
			"ReadWriteOncePod, or readOnly")
	case !v.NodeDefers:
		return no("the CSI driver does not defer mounts")
	case len(v.Filesystems) == 0:
		return no("the runtime can mount no file system")
	}
	var missing []string
	need := func(ok bool, what string) {
		if !ok {
			missing = append(missing, what)
		}
	}
	if v.Group {
		if v.GroupPolicy == "Always" {
			need(has(crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS), "fsGroup with policy Always")
		} else {
			need(has(crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH), "fsGroup with policy OnRootMismatch")
		}
	}
	if v.SubPath {
		need(has(crustv1alpha1.RuntimeCapability_RPC_SUBPATH), "subPath")
	}
	if v.Label {
		if v.LabelOnMount {
			need(has(crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT), "a SELinux label as mount option")
		} else {
			need(has(crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL), "relabelling for SELinux")
		}
	}
	if len(missing) > 0 {
		return no("the runtime does not do %s", strings.Join(missing, ", "))
	}
	return Decision{Defer: true, Why: "the runtime can mount " + strings.Join(v.Filesystems, ", ") + " and do all that the pod asks for"}
}

// Grows tells whether a runtime can grow a mounted file system: its answer names those that it
// grows, or its capabilities cover all of them.
func Grows(has []Capability, supported *crustv1alpha1.RuntimeGetSupportedFileSystemsResponse, fstype string) bool {
	if some := supported.GetGrowingFileSystems(); len(some) > 0 {
		return slices.Contains(some, fstype)
	}
	return slices.Contains(has, crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE)
}
