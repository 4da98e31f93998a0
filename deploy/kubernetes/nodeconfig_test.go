package kubernetes_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

const nodeConfig = "overlays/node-config-example"

// mountOf is the mount that a path lies in.
func mountOf(c corev1.Container, path string) corev1.VolumeMount {
	var found corev1.VolumeMount
	for _, m := range c.VolumeMounts {
		if strings.HasPrefix(path+"/", m.MountPath+"/") && len(m.MountPath) > len(found.MountPath) {
			found = m
		}
	}
	return found
}

func volumeOf(t *testing.T, pod corev1.PodSpec, name string) corev1.Volume {
	t.Helper()
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		t.Fatalf("no volume %q", name)
	}
	return pod.Volumes[i]
}

// flag is the value of a flag.
func flag(t *testing.T, c corev1.Container, name string) string {
	t.Helper()
	for _, a := range c.Args {
		if value, ok := strings.CutPrefix(a, "--"+name+"="); ok {
			return value
		}
	}
	t.Fatalf("%s has no --%s: %v", c.Name, name, c.Args)
	return ""
}

// csi-node itself says what the file of the example gives which node. Every pool is in a
// directory of the node, and the classes' pools are there.
func TestNodeConfigOverlay(t *testing.T) {
	o := renderAny(t, nodeConfig)
	pod := o.daemon(t, "csi-node").Spec.Template.Spec
	c := checkPod(t, pod)["csi-node"]
	config, labels := flag(t, c, "config"), flag(t, c, "node-labels")
	m := mountOf(c, config)
	v := volumeOf(t, pod, m.Name)
	// A mount of a single file (subPath) would never follow the ConfigMap.
	if v.ConfigMap == nil || m.SubPath != "" || len(o.configMaps) != 1 ||
		v.ConfigMap.Name != o.configMaps[0].Name || o.configMaps[0].Namespace != namespace {
		t.Fatalf("--config=%s is in %+v, %+v", config, m, v)
	}
	dir := t.TempDir()
	text := o.configMaps[0].Data[strings.TrimPrefix(config, m.MountPath+"/")]
	for name, text := range map[string]string{"config.yaml": text, "none": "a=\"b\"\n", "nvme": "example.com/disk=\"nvme\"\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program, pools := testnode.BuildCommand(t, "csi-node", ""), map[string]bool{}
	for name, want := range map[string]string{"none": "", "nvme": "--pool=fast=loop:/mnt/crust-csi/nvme"} {
		args := slices.Clone(c.Args)
		args[slices.Index(args, "--config="+config)] = "--config=" + filepath.Join(dir, "config.yaml")
		args[slices.Index(args, "--node-labels="+labels)] = "--node-labels=" + filepath.Join(dir, name)
		out, err := exec.Command(program, append(args, "--check-config")...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), want+"\n") || strings.Contains(string(out), "fast") != (want != "") {
			t.Errorf("a node with the labels %s: %v %s", name, err, out)
		}
		for line := range strings.Lines(string(out)) {
			if pool, ok := strings.CutPrefix(strings.TrimSpace(line), "--pool="); ok {
				name, at, _ := strings.Cut(pool, "=loop:")
				m := mountOf(c, at)
				if v := volumeOf(t, pod, m.Name); v.HostPath == nil || v.HostPath.Path != m.MountPath {
					t.Errorf("pool %s at %s is not the node's: %+v", name, at, m)
				} else if at != m.MountPath &&
					(m.MountPropagation == nil || *m.MountPropagation != corev1.MountPropagationHostToContainer) {
					t.Errorf("a disk that is mounted later at %s is not seen", at)
				}
				pools[name] = true
			}
		}
	}
	if slices.ContainsFunc(o.classes, func(s storagev1.StorageClass) bool { return !pools[s.Parameters["pool"]] }) || len(o.classes) != 5 {
		t.Errorf("classes %v of pools %v", o.classes, pools)
	}
}

// csi-node gets its labels and no token: who fetches them has it alone, is not root, ends
// before csi-node starts, and may read nodes and nothing else.
func TestA09_WhoFetchesLabelsHasTheTokenAlone(t *testing.T) {
	o := renderAny(t, nodeConfig)
	pod := o.daemon(t, "csi-node").Spec.Template.Spec
	if len(pod.InitContainers) != 1 || len(pod.Containers) != 1 || !is(pod.AutomountServiceAccountToken, false) {
		t.Fatalf("%+v", pod)
	}
	fetch, node := pod.InitContainers[0], pod.Containers[0]
	steward := testnode.BuildCommand(t, "csi-steward", "")
	if out, err := exec.Command(steward, append(fetch.Args, "--version")...).CombinedOutput(); err != nil {
		t.Errorf("csi-steward %v: %v %s", fetch.Args, err, out)
	}
	for _, m := range node.VolumeMounts {
		if volumeOf(t, pod, m.Name).Projected != nil {
			t.Errorf("csi-node has the token, at %s", m.MountPath)
		}
	}
	labels := flag(t, node, "node-labels")
	written, used := mountOf(fetch, flag(t, fetch, "output")), mountOf(node, labels)
	if labels != flag(t, fetch, "output") || written.Name != used.Name || !used.ReadOnly || volumeOf(t, pod, used.Name).EmptyDir == nil {
		t.Errorf("%+v is written, %+v read", written, used)
	}
	for _, m := range fetch.VolumeMounts {
		v := volumeOf(t, pod, m.Name)
		if v.HostPath != nil || v.Projected == nil && m.Name != written.Name {
			t.Errorf("%s has %+v", fetch.Name, v)
		}
	}
	sc := fetch.SecurityContext
	if sc == nil || !is(sc.RunAsNonRoot, true) || sc.RunAsUser == nil || *sc.RunAsUser == 0 || !is(sc.AllowPrivilegeEscalation, false) ||
		!is(sc.ReadOnlyRootFilesystem, true) || sc.Capabilities == nil || !slices.Equal(sc.Capabilities.Drop, []corev1.Capability{"ALL"}) ||
		len(sc.Capabilities.Add) > 0 || sc.SeccompProfile == nil || sc.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("%s: %+v", fetch.Name, sc)
	}
	var rules []rbacv1.PolicyRule
	for _, b := range o.clusterBindings {
		if slices.ContainsFunc(b.Subjects, func(s rbacv1.Subject) bool {
			return s.Name == pod.ServiceAccountName && s.Namespace == namespace
		}) {
			i := slices.IndexFunc(o.clusterRoles, func(r rbacv1.ClusterRole) bool { return r.Name == b.RoleRef.Name })
			rules = append(rules, o.clusterRoles[i].Rules...)
		}
	}
	if len(rules) != 1 || !slices.Equal(rules[0].Resources, []string{"nodes"}) || !slices.Equal(rules[0].Verbs, []string{"get"}) ||
		!slices.Equal(rules[0].APIGroups, []string{""}) {
		t.Errorf("the account may: %+v", rules)
	}
	for _, b := range o.bindings {
		if slices.ContainsFunc(b.Subjects, func(s rbacv1.Subject) bool { return s.Name == pod.ServiceAccountName }) {
			t.Errorf("the account has the role %s", b.RoleRef.Name)
		}
	}
}
