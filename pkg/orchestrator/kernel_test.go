package orchestrator

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// The driver is told whose kernel mounts, by what the runtime says and by nobody
// else.
func TestA06_TheDriverIsToldWhoseKernelItIs(t *testing.T) {
	for _, c := range []struct {
		host bool
		want string
	}{{true, "host"}, {false, ""}} {
		r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
		if c.host {
			r.runtime.Capabilities = append(r.runtime.Capabilities, crustv1alpha1.RuntimeCapability_RPC_HOST_KERNEL)
		}
		for range 2 { // the second by the agent's record
			req := request()
			req.VolumeContext[attrKernel] = "host" // as somebody could write it in a volume's attributes
			_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
			ok(t, err)
			last := r.driver.published[len(r.driver.published)-1]
			if got := last.GetVolumeContext()[attrKernel]; got != c.want {
				t.Errorf("host kernel %v: the driver was told %q", c.host, got)
			}
		}
	}
}
