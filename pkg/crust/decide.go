package crust

import (
	"fmt"
	"slices"
	"strings"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Capability is one of RuntimeCapability.RPC.
type Capability = crustv1alpha1.RuntimeCapability_RPC_Type

// PodVolume is what is known of one volume of one pod when the orchestrator has
// to decide who mounts it.
type PodVolume struct {
	// Socket of the pod's RuntimeClass; empty when it has none.
	Socket string
	// Allowed by the StorageClass (allowRuntimeAssistedMount).
	Allowed bool
	// NodeDefers: the CSI node plugin has the capability to defer.
	NodeDefers bool
	// Capabilities and Filesystems of the runtime, as it answered.
	Capabilities []Capability
	Filesystems  []string

	Block bool // the pod uses it as a raw block device
	// Exclusive: no other pod can have it at the same time (ReadWriteOncePod).
	Exclusive bool
	// ReadOnly: the pod only reads it (the claim's readOnly, or ReadOnlyMany).
	ReadOnly bool
	// Group: the pod has an fsGroup. GroupPolicy is its fsGroupChangePolicy.
	Group       bool
	GroupPolicy string
	SubPath     bool // a container mounts a part of it
	// Label: the pod has a SELinux label for it; LabelOnMount: it is given as a
	// mount option.
	Label, LabelOnMount bool
}

// Decision is who mounts a volume.
type Decision struct {
	// Defer: NodePublishVolume is told of the runtime's file systems. (The driver
	// may still mount the volume itself, when the file system on it is another.)
	Defer bool
	// Why says in words what decided; for events and logs.
	Why string
}

// Decide follows the stories of KEP-2857: the volume is deferred when everything
// that the pod asks for can be done by the sandbox, and mounted by the CSI
// driver otherwise.
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
