package orchestrator

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// C15, C21: the driver learns which directories the kubelet will bind, and the runtime gets the paths below the target. The agent
// still knows them after a restart, without the API server.
func TestC15_C21_SubPathsOfADeferredVolume(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
		data := p.Spec.Containers[0].VolumeMounts[0]
		first, second := data, data
		first.SubPath, second.SubPath = "a/b", "./c/"
		p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{data, first, second}
		p.Spec.InitContainers = []corev1.Container{{Name: "init", VolumeMounts: []corev1.VolumeMount{first}}}
	}))...)
	for range 2 { // the second is a repeated call
		req := request()
		req.VolumeContext[crust.ContextSubPaths] = `["../else"]`
		_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
		ok(t, err)
		if got := r.driver.last().GetVolumeContext()[crust.ContextSubPaths]; got != `["a/b","c"]` {
			t.Errorf("the driver is told of %s", got)
		}
	}
	records, err := LoadRecords(r.records, "boot")
	ok(t, err)
	r.agent.Records = records
	pod := strings.TrimSuffix(target, "/volumes/kubernetes.io~csi/pv-1/mount")
	container := "c"
	if d, _ := records.Get(target); d.SubPaths["init/0"] != "a/b" {
		t.Errorf("%+v", d.SubPaths)
	} else {
		for mount := range d.SubPaths {
			if name, _, _ := strings.Cut(mount, "/"); name != "init" {
				container = name
			}
		}
	}
	for source, want := range map[string]string{
		pod + "/volume-subpaths/pv-1/" + container + "/1":   target + "/a/b",
		pod + "/volume-subpaths/pv-1/" + container + "/2":   target + "/c",
		pod + "/volume-subpaths/pv-1/init/0/":               target + "/a/b",
		"/data/kubelet/pods/u1/volume-subpaths/pv-1/init/0": target + "/a/b", // the kubelet's directory is a link
		target:                               target,
		pod + "/volume-subpaths/pv-2/init/0": pod + "/volume-subpaths/pv-2/init/0",
		"/var/lib/kubelet/pods/u2/volume-subpaths/pv-1/init/0": "/var/lib/kubelet/pods/u2/volume-subpaths/pv-1/init/0",
		pod + "/etc-hosts": pod + "/etc-hosts",
		"":                 "",
	} {
		if got, err := r.agent.MountSource(Sandbox{ID: "sb", PodUID: "u1"}, source); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %s", source, got, err, want)
		}
	}
	for _, source := range []string{"/" + container + "/0", "/none/1", "/init/0/more", "/init"} {
		if got, err := r.agent.MountSource(Sandbox{ID: "sb", PodUID: "u1"}, pod+"/volume-subpaths/pv-1"+source); err == nil {
			t.Errorf("%s is taken for %s", source, got)
		}
	}
}

// C21: story 2. The pod has a subPath, and the runtime has none.
func TestC21_ARuntimeWithoutSubPaths(t *testing.T) {
	r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
		p.Spec.Containers[0].VolumeMounts[0].SubPath = "a"
	}))...)
	r.runtime.Capabilities = []crust.Capability{crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS}
	_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
	ok(t, err)
	if said := r.said(); !strings.Contains(said, EventMountedByHost) || !strings.Contains(said, "the runtime does not do subPath") {
		t.Errorf("events: %q", said)
	}
	if got := r.driver.last().GetVolumeContext()[crust.ContextSubPaths]; got != "" {
		t.Errorf("a driver that mounts the volume is told of %s", got)
	}
}
