package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// labelConflict refuses a publish whose SELinux label, or lack of one, differs from the
// mounted volume's.
type labelConflict struct{ error }

func (c labelConflict) Unwrap() error { return c.error }

// conflictOfLabels says which labels conflict, and who has the volume.
func (d *Driver) conflictOfLabels(p *publication, have string) error {
	if err := mounter.CheckLabels(p.use.options); err != nil {
		return fmt.Errorf("volume %s: %w", p.id, err) // whatever other pods have
	}
	return labelConflict{fault.New(fault.State, "volume %s is mounted with the SELinux label %q and cannot be mounted with %q "+
		"at the same time: all its mounts on a node have one label%s. Give the pods the same seLinuxOptions, or run one after the other%s",
		p.id, have, p.use.options.Context(), d.usedBy(p), mounter.HeldBy(p.attachment.Device).After("; "))}
}

// otherLabel returns how the label of the mount at the target differs from the requested one, empty
// if it does not. A share without a label option has the label of its server and the policy, so
// only a requested label is compared there.
func otherLabel(p *publication, s *mounter.State) (differs string, err error) {
	want, have := p.use.options.Context(), ""
	switch {
	case p.attachment.Share == nil:
		o, err := mounter.ParseOptions([]string{p.staged.Superblock})
		if err != nil {
			return "", err
		}
		have = o.Context()
	case want == "":
		return "", nil
	default:
		if have, err = s.Label(); err != nil {
			return "", err
		}
	}
	if mounter.SameLabel(have, want) {
		return "", nil
	}
	return fmt.Sprintf("mounted with the SELinux label %q, asked for with %q", have, want), nil
}

// usedBy names the pods that have the volume, for another pod's error.
func (d *Driver) usedBy(p *publication) fault.Private {
	var pods []string
	for _, target := range d.publishedAt(p.src, p.id) {
		if pod := d.use(p.id, target).GetPod(); pod != "" && target != p.target {
			pods = append(pods, pod)
		}
	}
	return sayUsers(pods, p.namespace)
}

// sayUsers names pods as "namespace/name". Whoever may read events of a pod's namespace can read
// the pod's event, so it names only that namespace's pods. The log names all.
func sayUsers(pods []string, namespace string) fault.Private {
	if len(pods) == 0 {
		return fault.Private{}
	}
	pods = slices.Sorted(slices.Values(pods))
	var here []string
	for _, pod := range pods {
		if ns, name, ok := strings.Cut(pod, "/"); ok && ns == namespace {
			here = append(here, name)
		}
	}
	said := fault.Private{Detail: "used by " + strings.Join(pods, ", ")}
	switch len(here) {
	case len(pods):
		said.Public = fmt.Sprintf("; it is used by %s of this namespace", strings.Join(here, ", "))
	case 0:
		said.Public = "; it is used by a pod of another namespace"
	default:
		said.Public = fmt.Sprintf("; it is used by %s of this namespace, and by a pod of another", strings.Join(here, ", "))
	}
	return said
}

// countLabel counts mounts with a SELinux context, and publishes refused for a conflict.
func (d *Driver) countLabel(p *publication, err error) {
	outcome := "error"
	switch conflict := (labelConflict{}); {
	case errors.As(err, &conflict):
		outcome = "conflict"
	case p.use.block || p.use.options.Context() == "":
		return
	case err == nil:
		outcome = "applied"
	case errors.Is(err, mounter.ErrLabelMismatch):
		outcome = "mismatch"
	}
	d.Metrics.ContextMount(outcome, accessMode(p.use.mode))
}

// countConflict counts a repeated publish with another label. One with the same label mounts
// nothing, so it is not counted.
func (d *Driver) countConflict(p *publication, err error) {
	if conflict := (labelConflict{}); errors.As(err, &conflict) {
		d.countLabel(p, err)
	}
}

// accessMode returns a mode's name in metrics: that of the kubelet's metrics of labels
// (volume_manager_selinux_*), or "other" for a mode that Kubernetes does not use.
func accessMode(mode csi.VolumeCapability_AccessMode_Mode) string {
	switch mode {
	case singleWriter:
		return "RWOP"
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
		return "RWO"
	case csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		return "ROX"
	case csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:
		return "RWX"
	}
	return "other"
}
