package kubernetes_test

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"

	csidriver "github.com/crust-csi/crust-csi/pkg/driver"
)

const (
	driver    = "csi.crust.dev"
	namespace = "crust-csi"
)

var separator = regexp.MustCompile(`(?m)^---\n`)

// Rendering would hide a file that no kustomization names, or a doubled key.
func TestEveryFileIsStrict(t *testing.T) {
	var o objects
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		b, err := os.ReadFile(path)
		for _, doc := range separator.Split(string(b), -1) {
			o.add(t, path, []byte(doc))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(o.kustomizations) != 7 || len(o.classes) != 7 || len(o.daemons) != 5 {
		t.Errorf("%d kustomizations, %d classes, %d daemon sets", len(o.kustomizations), len(o.classes), len(o.daemons))
	}
}

func TestDriverAndClasses(t *testing.T) {
	o := render(t, "base")
	d := o.drivers[0].Spec
	if o.drivers[0].Name != driver || !is(d.AttachRequired, false) || !is(d.PodInfoOnMount, true) ||
		!is(d.FSGroupPolicy, storagev1.FileFSGroupPolicy) ||
		!is(d.SELinuxMount, true) || !is(d.StorageCapacity, true) ||
		!slices.Equal(d.VolumeLifecycleModes, []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}) {
		t.Errorf("CSIDriver: %+v", o.drivers[0])
	}
	want := map[string]string{"crust-ext4": "ext4 thin", "crust-xfs": "xfs thin", "crust-btrfs": "btrfs thin", "crust-thick": "ext4 thick"}
	for _, c := range o.classes {
		if c.Provisioner != driver || !is(c.VolumeBindingMode, storagev1.VolumeBindingWaitForFirstConsumer) ||
			!is(c.AllowVolumeExpansion, true) ||
			!is(c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete) {
			t.Errorf("StorageClass %s: %+v", c.Name, c)
		}
		p := c.Parameters
		if got := p["csi.storage.k8s.io/fstype"] + " " + p["provisioning"]; got != want[c.Name] || p["pool"] != "default" || len(p) != 3 {
			t.Errorf("StorageClass %s: parameters %v", c.Name, p)
		}
		delete(want, c.Name)
	}
	if len(want) > 0 {
		t.Errorf("no StorageClass for %v", want)
	}
	if s := o.snapshotClasses[0]; s.Driver != driver || s.DeletionPolicy != "Delete" {
		t.Errorf("VolumeSnapshotClass: %+v", s)
	}
}

// The driver mounts with the label itself and asks /proc what the kernel has:
// neither selinuxfs nor /etc/selinux of the host is in its pod.
func TestS01_SELinuxMountAndNothingOfTheHost(t *testing.T) {
	o := render(t, "base")
	if !is(o.drivers[0].Spec.SELinuxMount, true) {
		t.Error("seLinuxMount is not true")
	}
	for _, v := range o.daemon(t, "csi-node").Spec.Template.Spec.Volumes {
		if v.HostPath != nil && strings.Contains(v.HostPath.Path, "selinux") {
			t.Errorf("the pod mounts %s of the host", v.HostPath.Path)
		}
	}
}

// B3: a pool's disk that is mounted while csi-node runs has to appear in its container.
func TestB03_CsiNodeSeesDisksThatAreMountedLater(t *testing.T) {
	for _, dir := range []string{"base"} {
		o := render(t, dir)
		d := o.daemon(t, "csi-node")
		pools := 0
		for _, m := range d.Spec.Template.Spec.Containers[0].VolumeMounts {
			if strings.HasPrefix(m.Name, "pool-") || strings.HasPrefix(m.Name, "disks-") {
				pools++
				if !is(m.MountPropagation, corev1.MountPropagationHostToContainer) {
					t.Errorf("%s: %s is mounted without mountPropagation: HostToContainer", dir, m.MountPath)
				}
			}
		}
		if pools == 0 {
			t.Errorf("%s: csi-node has no pool", dir)
		}
	}
}

// The examples are objects that exist, of classes that exist, with parameters
// that the driver takes.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	classes := map[string]bool{"": true, "crust-sandbox": true} // none: of a volume that was made by hand
	for _, c := range render(t, "base").classes {
		classes[c.Name] = true
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		here := maps.Clone(classes)
		used := map[string]bool{}
		for _, doc := range separator.Split(string(b), -1) {
			var head struct{ APIVersion, Kind string }
			if err := yaml.Unmarshal([]byte(doc), &head); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			switch head.Kind {
			case "StorageClass":
				var c storagev1.StorageClass
				err = yaml.UnmarshalStrict([]byte(doc), &c)
				here[c.Name] = true
				if _, perr := csidriver.ParseParameters(c.Parameters); perr != nil || c.Provisioner != driver {
					t.Errorf("%s: %v %v", file, c, perr)
				}
			case "PersistentVolumeClaim":
				var c corev1.PersistentVolumeClaim
				err = yaml.UnmarshalStrict([]byte(doc), &c)
				used[*c.Spec.StorageClassName] = true
			case "PersistentVolume":
				var v corev1.PersistentVolume
				err = yaml.UnmarshalStrict([]byte(doc), &v)
				if v.Spec.CSI == nil || v.Spec.CSI.Driver != driver || len(v.Spec.CSI.VolumeAttributes) == 0 {
					t.Errorf("%s: %v", file, v.Spec.CSI)
				}
			case "VolumeSnapshot": // its claim is another page's
			case "Pod":
				var p corev1.Pod
				err = yaml.UnmarshalStrict([]byte(doc), &p)
				for _, v := range p.Spec.Volumes {
					if v.Ephemeral != nil {
						used[*v.Ephemeral.VolumeClaimTemplate.Spec.StorageClassName] = true
					}
				}
			default:
				t.Errorf("%s: an object of kind %q", file, head.Kind)
			}
			if err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
		for name := range used {
			if !here[name] {
				t.Errorf("%s: no StorageClass %s", file, name)
			}
		}
	}
}

func TestAccountsAgree(t *testing.T) {
	o := render(t, "base")
	accounts := map[string]bool{}
	for _, a := range o.accounts {
		accounts[a.Namespace+"/"+a.Name] = true
	}
	if o.namespaces[0].Name != namespace {
		t.Error("the namespace is not " + namespace)
	}
	for name, pod := range o.pods() {
		if pod.ServiceAccountName != name || !accounts[namespace+"/"+name] {
			t.Errorf("the pods of %s run as %q; accounts: %v", name, pod.ServiceAccountName, accounts)
		}
	}
	for i, name := range []string{"csi-steward", "csi-sidecars", "csi-resizer"} {
		subject := []rbacv1.Subject{{Kind: "ServiceAccount", Name: name, Namespace: namespace}}
		ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "crust-" + name}
		byName := func(a, b string) int { return strings.Compare(b, a) }
		slices.SortFunc(o.clusterBindings, func(a, b rbacv1.ClusterRoleBinding) int { return byName(a.Name, b.Name) })
		slices.SortFunc(o.bindings, func(a, b rbacv1.RoleBinding) int { return byName(a.Name, b.Name) })
		if b := o.clusterBindings[i]; !slices.Equal(b.Subjects, subject) || b.RoleRef != ref || !o.hasRole(ref) {
			t.Errorf("ClusterRoleBinding: %+v", b)
		}
		if i == 0 {
			continue // the steward has nothing of this namespace
		}
		ref.Kind, ref.Name = "Role", name
		if b := o.bindings[i-1]; !slices.Equal(b.Subjects, subject) || b.RoleRef != ref || b.Namespace != namespace || !o.hasRole(ref) {
			t.Errorf("RoleBinding: %+v", b)
		}
	}
}

func TestDaemonSet(t *testing.T) {
	o := render(t, "base")
	pod := o.daemon(t, "csi-node").Spec.Template.Spec
	containers := checkPod(t, o.daemon(t, "csi-sidecars").Spec.Template.Spec)
	maps.Copy(containers, checkPod(t, pod))
	maps.Copy(containers, checkPod(t, o.pods()["csi-resizer"]))
	checkPod(t, o.pods()["csi-steward"])
	for name, args := range map[string][]string{
		"csi-node": {"--endpoint=unix:///var/lib/kubelet/plugins/" + driver + "/csi.sock", "--kubelet-registration-dir=/var/lib/kubelet/plugins_registry", "--node-id=$(NODE_NAME)", "--expansion=node", "--pool=default=loop:/var/lib/crust-csi/pool",
			"--state-dir=/var/lib/csi-node", "--kubelet-dir=/var/lib/kubelet", "--metrics-address=*:9808"},
		"provisioner": {"--node-deployment", "--enable-capacity", "--capacity-ownerref-level=1",
			"--immediate-topology=false", "--strict-topology", "--extra-create-metadata", "--timeout=120s"},
		"snapshotter": {"--node-deployment", "--timeout=120s"},
		"resizer":     {"--leader-election", "--handle-volume-inuse-error=false"},
	} {
		for _, a := range args {
			if !slices.Contains(containers[name].Args, a) {
				t.Errorf("%s lacks %s: %v", name, a, containers[name].Args)
			}
		}
	}
	for _, name := range []string{"NODE_NAME", "NAMESPACE", "POD_NAME"} {
		if !slices.ContainsFunc(containers["provisioner"].Env, func(e corev1.EnvVar) bool { return e.Name == name }) {
			t.Errorf("provisioner lacks %s", name)
		}
	}

	if !pod.HostPID {
		t.Error("csi-node does not find the host's mount namespace")
	}
	node := containers["csi-node"]
	if node.SecurityContext == nil || !is(node.SecurityContext.Privileged, true) {
		t.Error("csi-node is not privileged")
	}
	port := map[string]int32{}
	for _, p := range node.Ports {
		port[p.Name] = p.ContainerPort
	}
	for path, p := range map[string]*corev1.Probe{"/healthz": node.LivenessProbe, "/readyz": node.ReadinessProbe} {
		if p == nil || p.HTTPGet == nil || p.HTTPGet.Path != path || port[p.HTTPGet.Port.String()] != 9808 {
			t.Errorf("probe of %s: %+v", path, p)
		}
	}
	kubelet := slices.IndexFunc(node.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/var/lib/kubelet" })
	if kubelet < 0 || !is(node.VolumeMounts[kubelet].MountPropagation, corev1.MountPropagationBidirectional) {
		t.Error("mounts under the kubelet's directory would stay in the container")
	}
	host := map[string]string{
		"/dev": "/dev", "/var/lib/kubelet": "/var/lib/kubelet", "/var/lib/csi-node": "/var/lib/csi-node",
		"/var/lib/crust-csi/pool": "/var/lib/crust-csi/pool",
	}
	for _, m := range node.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if i >= 0 && pod.Volumes[i].EmptyDir != nil {
			continue // what a program may write for itself, /tmp and /run
		}
		if i < 0 || pod.Volumes[i].HostPath == nil || pod.Volumes[i].HostPath.Path != host[m.MountPath] {
			t.Errorf("%s is not the host's %s", m.MountPath, host[m.MountPath])
		}
		delete(host, m.MountPath)
	}
	if len(host) > 0 {
		t.Errorf("csi-node does not mount %v", host)
	}
}

// A daemon that answers late, because other pods keep all processors busy, is not restarted for that: it would take even longer.
func TestFleet_ABusyNodeRestartsNoDaemon(t *testing.T) {
	const late = 10 // seconds: what an answer took on two processors with forty processes that wanted them
	for dir, want := range map[string]int{"base": 1, "crust": 3, "microvm": 4} {
		var alive int
		o := renderAny(t, dir)
		for name, pod := range o.pods() {
			for _, c := range pod.Containers {
				if p := c.LivenessProbe; p != nil {
					alive++
					if p.TimeoutSeconds < late || p.PeriodSeconds < p.TimeoutSeconds || p.FailureThreshold < 3 {
						t.Errorf("%s: %s of %s: %+v", dir, c.Name, name, p)
					}
				}
			}
		}
		if alive != want {
			t.Errorf("%s: %d containers tell whether they live, not %d", dir, alive, want)
		}
	}
}
