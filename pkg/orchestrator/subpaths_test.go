package orchestrator

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	r.driver.noSubPaths = true // an older version, which refuses words that it does not know
	req := request()
	req.VolumeContext[crust.ContextSubPaths] = `["../else"]`
	_, err := r.kubelet.NodePublishVolume(r.ctx(), req)
	ok(t, err)
	if got := r.driver.last().GetVolumeContext()[crust.ContextSubPaths]; got != "" {
		t.Errorf("an older driver is told of %s", got)
	}
	records, err := LoadRecords(r.records, "boot")
	ok(t, err)
	r.agent.Records = records
	dir := strings.TrimSuffix(target, "/volumes/kubernetes.io~csi/pv-1/mount")
	if d, _ := records.Get(target); len(d.SubPaths) != 3 {
		t.Errorf("%+v", d.SubPaths)
	}
	for source, want := range map[string]string{
		dir + "/volume-subpaths/pv-1/c/1":                   target + "/a/b",
		dir + "/volume-subpaths/pv-1/c/2":                   target + "/c",
		dir + "/volume-subpaths/pv-1/init/0/":               target + "/a/b",
		"/data/kubelet/pods/u1/volume-subpaths/pv-1/init/0": target + "/a/b", // the kubelet's directory is a link
		// Anything else is none of the volume's: another volume of the pod's, of another pod, without a subPath.
		target:                                "",
		dir + "/volume-subpaths/pv-2/init/0":  "",
		dir + "/volume-subpaths/pv-10/init/0": "",
		"/var/lib/kubelet/pods/u2/volume-subpaths/pv-1/init/0": "",
		dir + "/etc-hosts":                   "",
		"":                                   "",
		dir + "/volume-subpaths/pv-1/c/0":    "",
		dir + "/volume-subpaths/pv-1/none/1": "",
		dir + "/volume-subpaths/pv-1/init/0/more": "",
		dir + "/volume-subpaths/pv-1/init":        "",
		dir + "/volume-subpaths/pv-1":             "",
	} {
		if want == "" {
			want = source
		}
		got, err := r.agent.MountSources(Sandbox{ID: "sb", PodUID: "u1"}, []string{"/x", source})
		if err != nil || len(got) != 2 || got[0] != "/x" || got[1] != want {
			t.Errorf("%s: %q; want %s", source, got, want)
		}
	}
}

// C21, U04: story 2. The pod has a subPath, and the runtime has none, or the container's mount would not be id-mapped.
func TestC21_U04_RuntimesAndSubPaths(t *testing.T) {
	const (
		stats = crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS
		sub   = crustv1alpha1.RuntimeCapability_RPC_SUBPATH
		host  = crustv1alpha1.RuntimeCapability_RPC_HOST_KERNEL
	)
	for name, c := range map[string]struct {
		has   []crust.Capability
		users *bool
		why   string // empty: it is deferred
	}{
		"without":                {[]crust.Capability{stats, host}, nil, "the runtime does not do subPath"},
		"with":                   {[]crust.Capability{sub, host}, nil, ""},
		"hostUsers is true":      {[]crust.Capability{sub, host}, new(true), ""},
		"hostUsers is false":     {[]crust.Capability{sub, host}, new(false), "the mount would not be id-mapped"},
		"users of its own guest": {[]crust.Capability{sub}, new(false), ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, append(storage("true", corev1.ReadWriteOncePod), pod(func(p *corev1.Pod) {
				p.Spec.Containers[0].VolumeMounts[0].SubPath, p.Spec.HostUsers = "a", c.users
			}))...)
			r.runtime.Capabilities = c.has
			_, err := r.kubelet.NodePublishVolume(r.ctx(), request())
			ok(t, err)
			said, event, told := r.said(), EventMountedByHost, ""
			if c.why == "" {
				event, told = EventDeferred, `["a"]`
			}
			if !strings.Contains(said, event) || !strings.Contains(said, c.why) {
				t.Errorf("events: %q", said)
			}
			if got := r.driver.last().GetVolumeContext()[crust.ContextSubPaths]; got != told {
				t.Errorf("the driver is told of %q", got)
			}
		})
	}
}

// C15, C21: the value of a subPathExpr is what the kubelet makes of it, or nobody's guess.
func TestC15_C21_ASubPathExpr(t *testing.T) {
	field := func(name, path string) corev1.EnvVar {
		return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}}
	}
	env := []corev1.EnvVar{
		{Name: "TEXT", Value: "first"}, {Name: "TEXT", Value: "a/b"}, {Name: "EMPTY"}, {Name: "NESTED", Value: "$(TEXT)"},
		field("NAME", "metadata.name"), field("NAMESPACE", "metadata.namespace"), field("UID", "metadata.uid"),
		field("NODE", "spec.nodeName"), field("IP", "status.podIP"), field("LABEL", "metadata.labels['x']"),
		{Name: "SECRET", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "k"}}},
		field("TWICE", "metadata.name"), {Name: "TWICE", Value: "text"},
		{Name: "HIDDEN", Value: "text"}, {Name: "HIDDEN", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{}}},
	}
	for expr, want := range map[string]string{
		"plain": "plain", "$(TEXT)": "a/b", "x/$(NAME)-$(NAMESPACE)/y": "x/p-ns/y", "$(UID)": "u1", "$(NODE)/": "node",
		"$$(NAME)": "$(NAME)", "$$": "$", "a$(EMPTY)b": "ab", "$(TWICE)": "text",
		// Only the kubelet knows these.
		"$(NESTED)": "", "$(IP)": "", "$(LABEL)": "", "$(SECRET)": "", "$(HIDDEN)": "", "$(NONE)": "", "$(NAME": "", "$NAME": "", "a$": "",
		"$()": "",
	} {
		var v volume
		v.noteSubPaths(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u1"}, Spec: corev1.PodSpec{
			NodeName: "node", Containers: []corev1.Container{{Name: "c", Env: env, VolumeMounts: []corev1.VolumeMount{
				{Name: "other", SubPath: "other"}, {Name: "data", SubPathExpr: expr}}}},
		}}, "data")
		if got := v.subPaths["c/1"]; got != want || v.subPathExpr != (want == "") || len(v.subPaths) > 1 {
			t.Errorf("%s: %q, %+v; want %q", expr, got, v, want)
		}
	}
}
