package orchestrator

import (
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Several sandboxes may read a device, and no driver sees whether one of them still does. So the
// runtime must say that it has released the volume. Of a single one, writable or not, the driver
// sees whether the device is free.
func TestC24_ARuntimeThatDoesNotAnswerAReadOnlyVolumesRelease(t *testing.T) {
	for name, c := range map[string]struct {
		readOnly, others bool
		want             codes.Code
	}{
		"one of several readers": {true, true, codes.Unavailable},
		"the only reader":        {true, false, codes.OK},
		"a writer":               {false, false, codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
			req := request()
			req.Readonly = c.readOnly
			_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
			ok(t, err)
			ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
			if c.others {
				d, _ := r.agent.Records.Get(target)
				d.Target += "-of-another"
				ok(t, r.agent.Records.Put(d))
			}
			unpublish := func() error {
				_, err := r.kubelet.NodeUnpublishVolume(r.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
				return err
			}
			r.manager.fail.Store(true)
			if err := unpublish(); status.Code(err) != c.want {
				t.Errorf("%v, want %s", err, c.want)
			}
			if _, known := r.agent.Records.Get(target); known != c.others {
				t.Errorf("the deferral is known: %v", known)
			}
			r.manager.fail.Store(false)
			ok(t, unpublish())
			if _, known := r.agent.Records.Get(target); known {
				t.Error("the deferral is still known")
			}
		})
	}
}

// C24: a runtime is gone for good, and all pods that read a volume end. Readers that end do not wait for each other: whether a sandbox
// still has the device is the driver's to see.
func TestC24_AllReadersEndWithoutTheirRuntime(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(nil))...)
	req := request()
	req.Readonly = true
	_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
	ok(t, err)
	ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
	d, _ := r.agent.Records.Get(target)
	another := target + "-of-another"
	d.Target = another
	ok(t, r.agent.Records.Put(d))
	ok(t, r.agent.Records.Place(another, "sb2", true))
	r.manager.fail.Store(true)
	unpublish := func(target string) codes.Code {
		_, err := r.kubelet.NodeUnpublishVolume(r.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
		return status.Code(err)
	}
	if code := unpublish(target); code != codes.Unavailable {
		t.Errorf("while another stays: %s", code)
	}
	_, err = r.kubelet.NodePublishVolume(r.ctx(), req) // it is wanted after all
	ok(t, err)
	if code := unpublish(another); code != codes.Unavailable {
		t.Errorf("while one stays again: %s", code)
	}
	for _, target := range []string{target, another} {
		if code := unpublish(target); code != codes.OK {
			t.Errorf("%s, when all are to end: %s", target, code)
		}
	}
	if left := r.agent.Records.All(); len(left) > 0 {
		t.Errorf("records are left: %v", left)
	}
}

// An annotation that is removed from a RuntimeClass decides for new pods only: a repeated
// call gets the same answer as the first one.
func TestC22_ARepeatedPublishAfterTheRuntimeClassChanged(t *testing.T) {
	r := deferredRig(t)
	class, err := r.cluster.NodeV1().RuntimeClasses().Get(r.ctx(), "sandbox", metav1.GetOptions{})
	ok(t, err)
	class = class.DeepCopy()
	class.Annotations = nil
	_, err = r.cluster.NodeV1().RuntimeClasses().Update(r.ctx(), class, metav1.UpdateOptions{})
	ok(t, err)
	for class.Annotations = map[string]string{"": ""}; err != nil || class.Annotations != nil; time.Sleep(time.Millisecond) {
		class, err = r.agent.Pods.classes.Get("sandbox") // the agent's watch reports it a little later
	}
	_, err = r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	if fs, err := crust.SupportedFilesystems(r.driver.last()); err != nil || len(fs) == 0 {
		t.Errorf("the driver is told of %v, %v", fs, err)
	}
	if d, known := r.agent.Records.Get(target); !known || d.Source == "" {
		t.Errorf("the deferral is %+v, %v", d, known)
	}
}

// C17: a runtime grows some file systems only. The driver's answer tells the kubelet to wait for the
// pod's end, before there is a sandbox too.
func TestC17_ARuntimeThatGrowsSomeFileSystems(t *testing.T) {
	for name, c := range map[string]struct {
		growing []string
		resize  bool // VOLUME_RESIZE
		want    codes.Code
	}{
		"others, and it has VOLUME_RESIZE": {[]string{"xfs"}, true, codes.FailedPrecondition},
		"this one":                         {[]string{"xfs", "ext4"}, false, codes.OK},
		"all":                              {nil, true, codes.OK},
		"none":                             {nil, false, codes.FailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			r := deferredRig(t)
			r.runtime.Growing = c.growing
			if !c.resize {
				r.runtime.Capabilities = slices.DeleteFunc(r.runtime.Capabilities,
					func(c crust.Capability) bool { return c == crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE })
			}
			for _, when := range []string{"before there is a sandbox", "in a sandbox"} {
				_, err := r.kubelet.NodeExpandVolume(r.ctx(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: target,
					CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30}})
				if status.Code(err) != c.want {
					t.Errorf("%s: %v, want %s", when, err, c.want)
				}
				ok(t, r.agent.publishAll(r.ctx(), "u1", podSandbox{"sb", 1}))
			}
			if asked := slices.Contains(r.runtime.Calls(), "RuntimeExpandVolume"); asked != (c.want == codes.OK) {
				t.Errorf("the runtime was asked to grow it: %v", asked)
			}
		})
	}
}
