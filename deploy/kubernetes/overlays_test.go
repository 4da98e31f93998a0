package kubernetes_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	csidriver "github.com/crust-csi/crust-csi/pkg/driver"
)

func TestDeviceOverlay(t *testing.T) {
	o, overlay := render(t, "base"), render(t, "overlays/device-example")
	base := checkPod(t, o.daemon(t, "csi-node").Spec.Template.Spec)["csi-node"].Args
	args := checkPod(t, overlay.daemon(t, "csi-node").Spec.Template.Spec)["csi-node"].Args
	if !slices.Equal(args, append(base, "--allow-device=/dev/disk/by-id/example-*")) {
		t.Errorf("args: %v", args)
	}
}

// Found by an operator: there was no example of a second pool.
func TestB10_SecondPoolOverlay(t *testing.T) {
	o := renderAny(t, "overlays/second-pool-example")
	pod := o.daemon(t, "csi-node").Spec.Template.Spec
	c := checkPod(t, pod)["csi-node"]
	dir := ""
	for _, arg := range c.Args {
		if at, ok := strings.CutPrefix(arg, "--pool=fast=loop:"); ok {
			dir = at
		}
	}
	sees := false
	for _, m := range c.VolumeMounts {
		// A disk that is mounted later has to be seen.
		if m.MountPath != "/" && strings.HasPrefix(dir, m.MountPath+"/") && m.MountPropagation != nil &&
			*m.MountPropagation == corev1.MountPropagationHostToContainer {
			sees = true
		}
	}
	if dir == "" || !sees {
		t.Errorf("--pool=fast at %q is not seen: %v", dir, c.VolumeMounts)
	}
	if !slices.ContainsFunc(o.classes, func(s storagev1.StorageClass) bool { return s.Parameters["pool"] == "fast" }) {
		t.Error("no class has the pool")
	}
}

// With CRUST the agent is what the kubelet knows, and all parts mean the same
// sockets.
func TestCRUST(t *testing.T) {
	o := renderAny(t, "crust")
	all := map[string]corev1.Container{}
	for _, d := range o.daemons {
		for name, c := range checkPod(t, d.Spec.Template.Spec) {
			all[name] = c
		}
		if d.Namespace != namespace {
			t.Errorf("%s is in %s", d.Name, d.Namespace)
		}
	}
	for _, a := range all["csi-node"].Args {
		if dir, ok := strings.CutPrefix(a, "--kubelet-registration-dir="); ok && dir != "" {
			t.Error("the driver and the agent both register")
		}
	}
	if len(o.runtimeClasses) != 1 || len(o.classes) != 5 {
		t.Fatalf("%d RuntimeClasses, %d StorageClasses", len(o.runtimeClasses), len(o.classes))
	}
	socket := o.runtimeClasses[0].Annotations["crust.csi.dev/fs-mgmt-socket"]
	if !slices.Contains(all["crustd"].Args, "--endpoint="+socket) {
		t.Errorf("crustd %v does not serve %s", all["crustd"].Args, socket)
	}
	own := slices.IndexFunc(all["csi-node"].Args, func(a string) bool { return strings.HasPrefix(a, "--endpoint=") })
	if own < 0 || !slices.Contains(all["crust-agent"].Args, "--driver="+strings.TrimPrefix(all["csi-node"].Args[own], "--endpoint=")) {
		t.Errorf("crust-agent %v does not find the driver %v", all["crust-agent"].Args, all["csi-node"].Args)
	}
	allowed := slices.ContainsFunc(o.classes,
		func(c storagev1.StorageClass) bool { return c.Parameters["allowRuntimeAssistedMount"] == "true" })
	for _, c := range o.classes {
		if _, err := csidriver.ParseParameters(c.Parameters); err != nil {
			t.Errorf("%s: %v", c.Name, err)
		}
	}
	if !allowed {
		t.Error("no class allows it")
	}
}

// All three daemons send traces to the same collector, by an address of the node that
// is known before it is used, and say which node they are on.
func TestTraces_Overlay(t *testing.T) {
	o := renderAny(t, "overlays/traces-example")
	for daemon, container := range map[string]string{"csi-node": "csi-node", "crust": "crustd", "crust-agent": "crust-agent"} {
		known := map[string]bool{}
		values := map[string]string{}
		for _, e := range checkPod(t, o.daemon(t, daemon).Spec.Template.Spec)[container].Env {
			for _, name := range []string{"HOST_IP", "NODE_NAME"} {
				if strings.Contains(e.Value, "$("+name+")") && !known[name] {
					t.Errorf("%s: %s uses %s before it is known", daemon, e.Name, name)
				}
			}
			known[e.Name], values[e.Name] = true, e.Value
		}
		endpoint, node := values["OTEL_EXPORTER_OTLP_ENDPOINT"], values["OTEL_RESOURCE_ATTRIBUTES"]
		if endpoint != "http://$(HOST_IP):4317" || node != "k8s.node.name=$(NODE_NAME)" {
			t.Errorf("%s: %v", daemon, values)
		}
	}
	for _, d := range renderAny(t, "crust").daemons {
		for _, c := range d.Spec.Template.Spec.Containers {
			if slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return strings.HasPrefix(e.Name, "OTEL_") }) {
				t.Errorf("%s sends traces without being asked to", c.Name)
			}
		}
	}
}

// Every example works with CRUST and with microVMs, too, if its base is replaced as its comments say.
func TestB10_EveryExampleWorksWithCRUST(t *testing.T) {
	examples, err := filepath.Glob("overlays/*/kustomization.yaml")
	if err != nil || len(examples) < 4 {
		t.Fatalf("%q, %v", examples, err)
	}
	for _, base := range []string{"crust", "microvm"} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(".")); err != nil {
			t.Fatal(err)
		}
		for _, file := range examples {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			next := regexp.MustCompile(`\[\.\./\.\./(base|crust)\b`).ReplaceAll(b, []byte("[../../"+base))
			if err := os.WriteFile(filepath.Join(dir, file), next, 0o600); err != nil {
				t.Fatal(err)
			}
			o := renderAny(t, filepath.Join(dir, filepath.Dir(file)))
			for _, d := range o.daemons {
				c := d.Spec.Template.Spec.Containers[0]
				traced := slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return strings.HasPrefix(e.Name, "OTEL_") })
				if strings.Contains(file, "traces") && d.Name != "csi-sidecars" && !traced {
					t.Errorf("%s on %s: %s sends no traces", file, base, d.Name)
				}
				if strings.Contains(strings.Join(c.Args, " "), "--kubelet-registration-dir=/") && d.Name == "csi-node" {
					t.Errorf("%s on %s: csi-node registers itself beside crust-agent", file, base)
				}
			}
		}
	}
}
