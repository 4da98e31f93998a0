package helm_test

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	crust      = values{"crust": values{"enabled": true}}
	microVM    = values{"crust": values{"enabled": true, "microVM": values{"enabled": true}}}
	secondPool = read(`
pools:
  - {name: default, path: /var/lib/crust-csi/pool}
  - {name: fast, path: /mnt/fast/crust-csi, disk: /mnt/fast}
storageClasses:
  - {name: crust-ext4, parameters: {pool: default, csi.storage.k8s.io/fstype: ext4, provisioning: thin}}
  - {name: crust-xfs, parameters: {pool: default, csi.storage.k8s.io/fstype: xfs, provisioning: thin}}
  - {name: crust-btrfs, parameters: {pool: default, csi.storage.k8s.io/fstype: btrfs, provisioning: thin}}
  - {name: crust-thick, parameters: {pool: default, csi.storage.k8s.io/fstype: ext4, provisioning: thick}}
  - {name: crust-fast, parameters: {pool: fast, csi.storage.k8s.io/fstype: xfs, provisioning: thin}}
`)
	nodePools = read(`
nodePools:
  nodes:
    - name: nvme
      selector: {matchLabels: {example.com/disk: nvme}}
      pools:
        - {name: default, path: /var/lib/crust-csi/pool}
        - {name: fast, path: /mnt/crust-csi/nvme}
  directories: [/mnt/crust-csi]
storageClasses:
  - {name: crust-ext4, parameters: {pool: default, csi.storage.k8s.io/fstype: ext4, provisioning: thin}}
  - {name: crust-xfs, parameters: {pool: default, csi.storage.k8s.io/fstype: xfs, provisioning: thin}}
  - {name: crust-btrfs, parameters: {pool: default, csi.storage.k8s.io/fstype: btrfs, provisioning: thin}}
  - {name: crust-thick, parameters: {pool: default, csi.storage.k8s.io/fstype: ext4, provisioning: thick}}
  - {name: crust-fast, parameters: {pool: fast, csi.storage.k8s.io/fstype: xfs, provisioning: thin}}
`)
	// same says with which values the chart is which directory of deploy/kubernetes.
	same = map[string]values{
		"base":                         {},
		"crust":                        crust,
		"microvm":                      microVM,
		"overlays/second-pool-example": secondPool,
		"overlays/node-config-example": nodePools,
		"overlays/device-example":      {"allowDevices": []any{"/dev/disk/by-id/example-*"}},
		"overlays/traces-example": {"crust": values{"enabled": true}, "traces": values{
			"OTEL_EXPORTER_OTLP_ENDPOINT": "http://$(HOST_IP):4317",
			"OTEL_TRACES_SAMPLER":         "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1",
		}},
	}
)

// equal compares object by object. What differs is said here, and is all:
//   - The namespace is made by `helm install --create-namespace`, or before.
//   - Kustomize does not know VolumeSnapshotClass and gives it a namespace, which the
//     API server drops.
//   - The text of the configuration file: what it says is compared.
func equal(t *testing.T, manifests, chart objects) {
	t.Helper()
	expected := map[string]bool{}
	for key, want := range manifests {
		switch want["kind"] {
		case "Namespace":
			continue
		case "VolumeSnapshotClass":
			delete(want["metadata"].(values), "namespace")
			key = "VolumeSnapshotClass /" + text(at(want, "metadata", "name"))
		case "ConfigMap":
			for _, object := range []values{want, chart[key]} {
				if data, ok := object["data"].(values); ok {
					data["config.yaml"] = read(text(data["config.yaml"]))
				}
			}
		}
		expected[key] = true
		if d := cmp.Diff(want, chart[key]); d != "" {
			t.Errorf("%s: deploy/kubernetes (-) and the chart (+) differ:\n%s", key, d)
		}
	}
	for key := range chart {
		if !expected[key] {
			t.Errorf("%s is in the chart alone", key)
		}
	}
}

func TestTheChartInstallsWhatTheManifestsInstall(t *testing.T) {
	for dir, v := range same {
		t.Run(dir, func(t *testing.T) {
			equal(t, kustomize(t, filepath.Join(manifests, dir)), render(t, namespace, v))
		})
	}
}

func TestEveryKustomizationIsCompared(t *testing.T) {
	n := 0
	err := filepath.WalkDir(manifests, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "kustomization.yaml" {
			return err
		}
		dir, err := filepath.Rel(manifests, filepath.Dir(path))
		n++
		if same[dir] == nil {
			t.Errorf("no values are compared with %s", dir)
		}
		return err
	})
	if err != nil || n != len(same) {
		t.Errorf("%d kustomizations: %v", n, err)
	}
}

// In another namespace the accounts are there, and so are the subjects of bindings and the
// users that the admission policies look at. Without that the policies restrict nobody.
func TestEverythingFollowsTheNamespace(t *testing.T) {
	dir := t.TempDir()
	here, err := filepath.Abs(filepath.Join(manifests, "crust"))
	if err != nil {
		t.Fatal(err)
	}
	base, err := filepath.Rel(dir, here)
	if err != nil {
		t.Fatal(err)
	}
	overlay := "namespace: storage\nresources: [\"" + base + "\"]\n"
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(overlay), 0o600); err != nil {
		t.Fatal(err)
	}
	want := kustomize(t, dir)
	users := 0
	for key, object := range want {
		if object["kind"] == "ValidatingAdmissionPolicy" { // kustomize does not know of the users in it
			users++
			want[key] = replaced(t, object, "system:serviceaccount:"+namespace+":", "system:serviceaccount:storage:")
		}
	}
	if users == 0 {
		t.Error("no admission policy")
	}
	got := render(t, "storage", crust)
	equal(t, want, got)
	for key, object := range got {
		for _, left := range []string{`"namespace":"` + namespace + `"`, "serviceaccount:" + namespace + ":"} {
			if strings.Contains(encoded(t, object), left) {
				t.Errorf("%s: %s is still there", key, left)
			}
		}
	}
}

// A namespace may be called 123, which YAML takes for a number.
func TestANamespaceThatIsANumber(t *testing.T) {
	want := objects{}
	for key, object := range render(t, "storage", crust) {
		object = replaced(t, object, `"namespace":"storage"`, `"namespace":"123"`)
		want[strings.Replace(key, " storage/", " 123/", 1)] = replaced(t, object, "serviceaccount:storage:", "serviceaccount:123:")
	}
	equal(t, want, render(t, "123", crust))
}

func TestEveryPathFollowsTheKubeletsDirectory(t *testing.T) {
	want := kustomize(t, filepath.Join(manifests, "crust"))
	for key, object := range want {
		want[key] = replaced(t, object, "/var/lib/kubelet", "/var/lib/k0s/kubelet")
	}
	equal(t, want, render(t, namespace, with(crust, "kubeletDir", "/var/lib/k0s/kubelet")))
}

// replaced is the object with another word for one, wherever it is.
func replaced(t *testing.T, object values, word, by string) values {
	t.Helper()
	return read(strings.ReplaceAll(encoded(t, object), word, by))
}

func encoded(t *testing.T, object values) string {
	t.Helper()
	b, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
