package kubernetes_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

// TestMain removes what the tests build.
func TestMain(m *testing.M) { testnode.Main(m) }

// objects are manifests, each read strictly as its type.
type objects struct {
	namespaces      []corev1.Namespace
	drivers         []storagev1.CSIDriver
	classes         []storagev1.StorageClass
	snapshotClasses []snapshotClass
	daemons         []appsv1.DaemonSet
	deployments     []appsv1.Deployment
	accounts        []corev1.ServiceAccount
	clusterRoles    []rbacv1.ClusterRole
	clusterBindings []rbacv1.ClusterRoleBinding
	roles           []rbacv1.Role
	bindings        []rbacv1.RoleBinding
	runtimeClasses  []nodev1.RuntimeClass
	policies        []admissionv1.ValidatingAdmissionPolicy
	policyBindings  []admissionv1.ValidatingAdmissionPolicyBinding
	kustomizations  []types.Kustomization
	configMaps      []corev1.ConfigMap
}

type snapshotClass struct {
	APIVersion     string            `json:"apiVersion"`
	Kind           string            `json:"kind"`
	Metadata       map[string]string `json:"metadata"`
	Driver         string            `json:"driver"`
	DeletionPolicy string            `json:"deletionPolicy"`
}

func read[T any](b []byte, list *[]T) error {
	var v T
	err := yaml.UnmarshalStrict(b, &v)
	*list = append(*list, v)
	return err
}

// add reads one manifest; a field that its type does not have is an error.
func (o *objects) add(t *testing.T, from string, b []byte) {
	t.Helper()
	var head struct{ APIVersion, Kind string }
	if err := yaml.Unmarshal(b, &head); err != nil {
		t.Fatalf("%s: %v", from, err)
	}
	var err error
	switch kind := head.APIVersion + " " + head.Kind; kind {
	case "v1 Namespace":
		err = read(b, &o.namespaces)
	case "v1 ServiceAccount":
		err = read(b, &o.accounts)
	case "storage.k8s.io/v1 CSIDriver":
		err = read(b, &o.drivers)
	case "storage.k8s.io/v1 StorageClass":
		err = read(b, &o.classes)
	case "snapshot.storage.k8s.io/v1 VolumeSnapshotClass":
		err = read(b, &o.snapshotClasses)
	case "apps/v1 DaemonSet":
		err = read(b, &o.daemons)
	case "apps/v1 Deployment":
		err = read(b, &o.deployments)
	case "rbac.authorization.k8s.io/v1 ClusterRole":
		err = read(b, &o.clusterRoles)
	case "rbac.authorization.k8s.io/v1 ClusterRoleBinding":
		err = read(b, &o.clusterBindings)
	case "rbac.authorization.k8s.io/v1 Role":
		err = read(b, &o.roles)
	case "rbac.authorization.k8s.io/v1 RoleBinding":
		err = read(b, &o.bindings)
	case "node.k8s.io/v1 RuntimeClass":
		err = read(b, &o.runtimeClasses)
	case "admissionregistration.k8s.io/v1 ValidatingAdmissionPolicy":
		err = read(b, &o.policies)
	case "admissionregistration.k8s.io/v1 ValidatingAdmissionPolicyBinding":
		err = read(b, &o.policyBindings)
	case "v1 ConfigMap":
		err = read(b, &o.configMaps)
	case "kustomize.config.k8s.io/v1beta1 Kustomization":
		err = read(b, &o.kustomizations)
	default:
		t.Errorf("%s: an object of kind %q", from, kind)
	}
	if err != nil {
		t.Errorf("%s: %v", from, err)
	}
}

func render(t *testing.T, dir string) objects {
	t.Helper()
	o := renderAny(t, dir)
	if len(o.namespaces) != 1 || len(o.drivers) != 1 || len(o.classes) != 4 || len(o.snapshotClasses) != 1 || len(o.daemons) != 2 ||
		len(o.deployments) != 2 || len(o.accounts) != 4 ||
		len(o.clusterRoles) != 3 || len(o.clusterBindings) != 3 || len(o.roles) != 2 || len(o.bindings) != 2 {
		t.Fatalf("%s: objects are missing, or there are too many: %d namespaces, %d drivers, %d classes, %d of snapshots, %d daemons, %d "+
			"deployments, %d accounts, roles %d and %d, bindings %d and %d", dir,
			len(o.namespaces), len(o.drivers), len(o.classes), len(o.snapshotClasses), len(o.daemons), len(o.deployments),
			len(o.accounts), len(o.clusterRoles), len(o.roles), len(o.clusterBindings), len(o.bindings))
	}
	return o
}

func renderAny(t *testing.T, dir string) objects {
	t.Helper()
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	var o objects
	for _, r := range m.Resources() {
		b, err := r.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		o.add(t, dir+": "+r.GetKind()+" "+r.GetName(), b)
	}
	return o
}

// daemon is the DaemonSet with that name.
func (o *objects) daemon(t *testing.T, name string) appsv1.DaemonSet {
	t.Helper()
	for _, d := range o.daemons {
		if d.Name == name {
			return d
		}
	}
	t.Fatalf("no DaemonSet %s", name)
	return appsv1.DaemonSet{}
}

func is[T comparable](p *T, want T) bool { return p != nil && *p == want }

func (o *objects) hasRole(ref rbacv1.RoleRef) bool {
	if ref.Kind == "Role" {
		return slices.ContainsFunc(o.roles, func(r rbacv1.Role) bool { return r.Name == ref.Name && r.Namespace == namespace })
	}
	return slices.ContainsFunc(o.clusterRoles, func(r rbacv1.ClusterRole) bool { return r.Name == ref.Name })
}

// pods are those of all DaemonSets and Deployments, by their names.
func (o *objects) pods() map[string]corev1.PodSpec {
	all := map[string]corev1.PodSpec{}
	for _, d := range o.daemons {
		all[d.Name] = d.Spec.Template.Spec
	}
	for _, d := range o.deployments {
		all[d.Name] = d.Spec.Template.Spec
	}
	return all
}

// checkPod looks at what holds for the base and for any overlay.
func checkPod(t *testing.T, pod corev1.PodSpec) map[string]corev1.Container {
	t.Helper()
	volumes := map[string]bool{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
	}
	containers := map[string]corev1.Container{}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		containers[c.Name] = c
		if _, tag, ok := strings.Cut(c.Image, ":"); !ok || tag == "latest" {
			t.Errorf("%s: image %s is not pinned", c.Name, c.Image)
		}
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("%s mounts %s, which does not exist", c.Name, m.Name)
			}
		}
	}
	// The binaries themselves read their arguments.
	for _, name := range []string{"csi-node", "crustd", "crust-agent"} {
		c, ok := containers[name]
		if !ok {
			continue
		}
		args := append(slices.Clone(c.Args), "--version")
		program := exec.Command(testnode.BuildCommand(t, name, ""), args...)
		program.Env = append(os.Environ(), "NODE_NAME=n")
		if out, err := program.CombinedOutput(); err != nil {
			t.Errorf("%s %v: %v %s", name, args, err, out)
		}
	}
	return containers
}
