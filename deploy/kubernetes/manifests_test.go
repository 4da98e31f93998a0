package kubernetes_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// objects are the rendered manifests, each read strictly as its type.
type objects struct {
	drivers   []storagev1.CSIDriver
	classes   []storagev1.StorageClass
	daemons   []appsv1.DaemonSet
	accounts  []corev1.ServiceAccount
	bindings  []rbacv1.ClusterRoleBinding
	snapshots int
}

type snapshotClass struct {
	APIVersion     string            `json:"apiVersion"`
	Kind           string            `json:"kind"`
	Metadata       map[string]string `json:"metadata"`
	Driver         string            `json:"driver"`
	DeletionPolicy string            `json:"deletionPolicy"`
}

func render(t *testing.T, dir string) objects {
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
		strict := func(into any) {
			if err := yaml.UnmarshalStrict(b, into); err != nil {
				t.Errorf("%s %s: %v", r.GetKind(), r.GetName(), err)
			}
		}
		switch r.GetKind() {
		case "CSIDriver":
			o.drivers = append(o.drivers, storagev1.CSIDriver{})
			strict(&o.drivers[len(o.drivers)-1])
		case "StorageClass":
			o.classes = append(o.classes, storagev1.StorageClass{})
			strict(&o.classes[len(o.classes)-1])
		case "DaemonSet":
			o.daemons = append(o.daemons, appsv1.DaemonSet{})
			strict(&o.daemons[len(o.daemons)-1])
		case "ServiceAccount":
			o.accounts = append(o.accounts, corev1.ServiceAccount{})
			strict(&o.accounts[len(o.accounts)-1])
		case "ClusterRoleBinding":
			o.bindings = append(o.bindings, rbacv1.ClusterRoleBinding{})
			strict(&o.bindings[len(o.bindings)-1])
		case "Namespace":
			strict(&corev1.Namespace{})
		case "ClusterRole":
			strict(&rbacv1.ClusterRole{})
		case "Role":
			strict(&rbacv1.Role{})
		case "RoleBinding":
			strict(&rbacv1.RoleBinding{})
		case "VolumeSnapshotClass":
			strict(&snapshotClass{})
			o.snapshots++
		default:
			t.Errorf("an object of kind %s", r.GetKind())
		}
	}
	return o
}

func TestBaseSaysWhatTheDriverIs(t *testing.T) {
	o := render(t, "base")
	if len(o.drivers) != 1 || len(o.daemons) != 1 || len(o.accounts) != 1 || len(o.classes) != 4 || o.snapshots != 1 {
		t.Fatalf("%d drivers, %d daemon sets, %d accounts, %d classes, %d snapshot classes", len(o.drivers), len(o.daemons), len(o.accounts), len(o.classes), o.snapshots)
	}
	d := o.drivers[0].Spec
	if *d.AttachRequired || !*d.PodInfoOnMount || *d.FSGroupPolicy != storagev1.FileFSGroupPolicy || !*d.SELinuxMount || !*d.StorageCapacity ||
		!slices.Equal(d.VolumeLifecycleModes, []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}) {
		t.Errorf("CSIDriver: %+v", d)
	}
	for _, c := range o.classes {
		if c.Provisioner != o.drivers[0].Name || *c.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer || !*c.AllowVolumeExpansion {
			t.Errorf("StorageClass %s: %+v", c.Name, c)
		}
	}
	pod := o.daemons[0].Spec.Template.Spec
	if pod.ServiceAccountName != o.accounts[0].Name || o.bindings[0].Subjects[0].Name != o.accounts[0].Name || o.bindings[0].Subjects[0].Namespace != o.accounts[0].Namespace {
		t.Error("the service accounts do not agree")
	}
	volumes := map[string]bool{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
	}
	for _, c := range pod.Containers {
		if !strings.Contains(c.Image, ":") || strings.HasSuffix(c.Image, ":latest") {
			t.Errorf("%s: image %s is not pinned", c.Name, c.Image)
		}
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("%s mounts %s, which does not exist", c.Name, m.Name)
			}
			if m.Name == "kubelet" && (m.MountPropagation == nil || *m.MountPropagation != corev1.MountPropagationBidirectional) {
				t.Error("mounts under the kubelet's directory would stay in the container")
			}
		}
	}
	flags := []string{"endpoint", "node-id", "driver-name", "pool", "allow-device", "state-dir", "kubelet-dir", "metrics-address", "log-format", "v"}
	for _, a := range pod.Containers[0].Args {
		name, _, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if !slices.Contains(flags, name) {
			t.Errorf("csi-node has no flag %s", a)
		}
	}
}

func TestDeviceOverlay(t *testing.T) {
	args := render(t, "overlays/device").daemons[0].Spec.Template.Spec.Containers[0].Args
	if !slices.Contains(args, "--allow-device=/dev/disk/by-id/example-*") {
		t.Errorf("args: %v", args)
	}
}
