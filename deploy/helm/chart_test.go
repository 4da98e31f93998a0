// Package helm_test checks the Helm chart in crust-csi.
package helm_test

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	release "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	chart     = "crust-csi"
	manifests = "../kubernetes"
	namespace = "crust-csi" // that the manifests name
)

type values = map[string]any

// objects are manifests as maps, by kind, namespace and name.
type objects map[string]values

func TestMain(m *testing.M) {
	slog.SetLogLoggerLevel(slog.LevelWarn) // Helm tells of every link that it follows
	code := m.Run()
	if built != "" {
		if err := os.RemoveAll(built); err != nil {
			panic(err)
		}
	}
	os.Exit(code)
}

// template is `helm template`, and what NOTES.txt says.
func template(t *testing.T, path, namespace string, v values) (*release.Release, error) {
	t.Helper()
	c, err := loader.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	i := action.NewInstall(action.NewConfiguration())
	i.DryRunStrategy = action.DryRunClient
	i.ReleaseName, i.Namespace, i.KubeVersion = "crust-csi", namespace, kubernetes(t)
	r, err := i.Run(c, clone(v))
	if err != nil {
		return nil, err
	}
	return r.(*release.Release), nil
}

// kubernetes is the oldest version that docs/install.md supports.
func kubernetes(t *testing.T) *common.KubeVersion {
	t.Helper()
	v, err := common.ParseKubeVersion("v1.31.0")
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// render is what the chart installs.
func render(t *testing.T, namespace string, v values) objects {
	t.Helper()
	r, err := template(t, chart, namespace, v)
	if err != nil {
		t.Fatalf("%v: %v", v, err)
	}
	return parse(t, r.Manifest)
}

func parse(t *testing.T, manifest string) objects {
	t.Helper()
	o := objects{}
	for _, doc := range strings.Split("\n"+manifest, "\n---\n") {
		o.add(t, []byte(doc))
	}
	return o
}

// kustomize is what a directory of the manifests installs.
func kustomize(t *testing.T, dir string) objects {
	t.Helper()
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	o := objects{}
	for _, r := range m.Resources() {
		b, err := r.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		o.add(t, b)
	}
	return o
}

var strict = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// add reads an object strictly: a doubled key, or a field that its type does not
// have, is an error.
func (o objects) add(t *testing.T, doc []byte) {
	t.Helper()
	object := values{}
	if err := yaml.UnmarshalStrict(doc, &object); err != nil {
		t.Fatalf("%v:\n%s", err, doc)
	}
	if len(object) == 0 {
		return
	}
	unknown := object["kind"] == "VolumeSnapshotClass" // a CRD's
	if _, _, err := strict.Decode(doc, nil, nil); err != nil && (!unknown || !runtime.IsNotRegisteredError(err)) {
		t.Errorf("%v:\n%s", err, doc)
	}
	meta := object["metadata"].(values)
	key := fmt.Sprintf("%s %s/%s", object["kind"], text(meta["namespace"]), meta["name"])
	if o[key] != nil {
		t.Errorf("two objects are %s", key)
	}
	o[key] = object
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

// at is a field of an object, nil if there is none.
func at(v any, path ...any) any {
	for _, key := range path {
		switch k := key.(type) {
		case string:
			m, _ := v.(values)
			v = m[k]
		case int:
			list, _ := v.([]any)
			if k >= len(list) {
				return nil
			}
			v = list[k]
		}
	}
	return v
}

// with is a copy of the values with one more at a path such as crust.enabled.
func with(v values, path string, value any) values {
	c := values{}
	for k, old := range v {
		c[k] = old
	}
	key, rest, deeper := strings.Cut(path, ".")
	if deeper {
		below, _ := c[key].(values)
		value = with(below, rest, value)
	}
	c[key] = value
	return c
}

// read is YAML as values.
func read(s string) values {
	v := values{}
	if err := yaml.UnmarshalStrict([]byte(s), &v); err != nil {
		panic(err)
	}
	return v
}

// clone is a copy for Helm, which writes into what it is given.
func clone(v values) values {
	b, err := yaml.Marshal(v)
	if err != nil {
		panic(err)
	}
	return read(string(b))
}
