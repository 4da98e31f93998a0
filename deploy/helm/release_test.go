package helm_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/kube"
	"helm.sh/helm/v4/pkg/kube/fake"
	release "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	"helm.sh/helm/v4/pkg/storage/driver"
)

func TestLint(t *testing.T) {
	for name, v := range map[string]values{"defaults": {}, "crust": crust, "second pool": secondPool} {
		l := action.NewLint()
		l.Strict, l.Namespace, l.KubeVersion = true, namespace, kubernetes(t)
		for _, m := range l.Run([]string{chart}, clone(v)).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}

func TestOldKubernetesIsRefused(t *testing.T) {
	c, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	for version, ok := range map[string]bool{"v1.30.9": false, "v1.31.0": true, "v1.36.3+k3s1": true, "v1.33.4-gke.1245000": true} {
		i := action.NewInstall(action.NewConfiguration())
		i.DryRunStrategy, i.ReleaseName, i.Namespace = action.DryRunClient, "a", namespace
		if i.KubeVersion, err = common.ParseKubeVersion(version); err != nil {
			t.Fatal(err)
		}
		if _, err := i.Run(c, values{}); (err == nil) != ok || !ok && !strings.Contains(err.Error(), "1.31") {
			t.Errorf("%s: %v", version, err)
		}
	}
}

// An upgrade with --reuse-values goes by what was installed and what is new, and is
// what an installation with both is.
func TestAnUpgradeIsWhatAnInstallationWouldBe(t *testing.T) {
	mem := driver.NewMemory()
	mem.SetNamespace(namespace)
	config := action.NewConfiguration()
	config.Releases = storage.Init(mem)
	config.KubeClient = &fake.PrintingKubeClient{Out: io.Discard, LogOutput: io.Discard}
	config.Capabilities = common.DefaultCapabilities.Copy()
	config.Capabilities.KubeVersion = *kubernetes(t)
	c, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	i := action.NewInstall(config)
	i.ReleaseName, i.Namespace, i.WaitStrategy = "crust-csi", namespace, kube.HookOnlyStrategy
	if _, err := i.Run(c, clone(secondPool)); err != nil {
		t.Fatal(err)
	}
	u := action.NewUpgrade(config)
	u.Namespace, u.ReuseValues, u.WaitStrategy, u.ServerSideApply = namespace, true, kube.HookOnlyStrategy, "auto"
	r, err := u.Run("crust-csi", c, clone(crust))
	if err != nil {
		t.Fatal(err)
	}
	got := parse(t, r.(*release.Release).Manifest)
	if d := cmp.Diff(render(t, namespace, with(secondPool, "crust", crust["crust"])), got); d != "" {
		t.Error(d)
	}
}

// The package has what the directory's links lead to, and the same bytes each time.
func TestThePackage(t *testing.T) {
	epoch := time.Unix(1767225600, 0)
	var packages [2][]byte
	var path string
	for n := range packages {
		p := action.NewPackage()
		p.Destination, p.SourceDateEpoch = t.TempDir(), &epoch
		var err error
		if path, err = p.Run(chart, nil); err != nil {
			t.Fatal(err)
		}
		if packages[n], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(packages[0], packages[1]) {
		t.Error("two packages of one chart differ")
	}
	z, err := gzip.NewReader(bytes.NewReader(packages[0]))
	if err != nil {
		t.Fatal(err)
	}
	for files := tar.NewReader(z); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.Equal(epoch) || h.Typeflag != tar.TypeReg {
			t.Errorf("%s: time %v, type %c", h.Name, h.ModTime, h.Typeflag)
		}
	}
	r, err := template(t, path, namespace, crust)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(render(t, namespace, crust), parse(t, r.Manifest)); d != "" {
		t.Error(d)
	}
}

// What is said after an installation is of these values.
func TestNotes(t *testing.T) {
	for want, v := range map[string]values{
		"kubectl -n storage rollout status daemonset/csi-node": {},
		"crust-ext4 crust-xfs crust-btrfs crust-thick.":        {},
		"Load csi-node and csi-steward\non every node":         {},
		"containerd's configuration":                           crust,
	} {
		r, err := template(t, chart, "storage", v)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(r.Info.Notes, want) {
			t.Errorf("%v: no %q in:\n%s", v, want, r.Info.Notes)
		}
	}
	v := read(`{storageClasses: [], csiNode: {image: {repository: registry.example/csi-node}}}`)
	r, err := template(t, chart, "storage", v)
	if err != nil {
		t.Fatal(err)
	}
	for _, not := range []string{"crust-ext4", "Load csi-node", "containerd"} {
		if strings.Contains(r.Info.Notes, not) {
			t.Errorf("%q in:\n%s", not, r.Info.Notes)
		}
	}
}
