package orchestrator

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// The driver learns whose kernel mounts from the runtime's answer only.
func TestA06_TheDriverIsToldWhoseKernelItIs(t *testing.T) {
	for _, c := range []struct {
		host bool
		want string
	}{{true, "host"}, {false, ""}} {
		r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
		if c.host {
			r.runtime.Capabilities = append(r.runtime.Capabilities, crustv1alpha1.RuntimeCapability_RPC_HOST_KERNEL)
		}
		for range 2 { // the second from the agent's record
			req := request()
			req.VolumeContext[crust.ContextKernel] = "host" // as a volume's attributes could have it
			_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
			ok(t, err)
			last := r.driver.published[len(r.driver.published)-1]
			if got := last.GetVolumeContext()[crust.ContextKernel]; got != c.want {
				t.Errorf("host kernel %v: the driver was told %q", c.host, got)
			}
		}
	}
}
