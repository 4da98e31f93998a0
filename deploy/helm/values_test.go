package helm_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// other has for each value one that is not the default.
var other = map[string]string{
	"kubeletDir": `/var/lib/k0s/kubelet`,
	"pools":      `[{name: default, path: /mnt/a/pool, disk: /mnt/a, overcommit: 1.5, reserve: 1Gi}, {name: b, path: /srv/b}]`,
	"nodePools.nodes": `[{name: a, selector: {matchExpressions: [{key: example.com/disk, operator: Exists}]},
		pools: [{name: default, path: /var/lib/crust-csi/pool, overcommit: 2, reserve: 2Gi}], allowDevices: ["/dev/mapper/x-*"]}]`,
	"nodePools.directories": `[/mnt/a, /mnt/b]`,
	"allowDevices":          `["/dev/disk/by-id/a-[0-9a-f]*", "/dev/mapper/x:"]`,
	"storageClasses": `[{name: "1", default: true, reclaimPolicy: Retain, allowVolumeExpansion: false, mountOptions: [noatime],
		parameters: {hostMayMount: true}}]`,
	"snapshots.enabled":        `false`,
	"snapshots.deletionPolicy": `Retain`,
	"snapshots.defaultClass":   `true`,
	"csiDriver.fsGroupPolicy":  `None`,
	"csiDriver.seLinuxMount":   `false`,
	"log.format":               `json`,
	"log.verbosity":            `0`,
	"log.sidecarVerbosity":     `5`,
	"traces":                   `{OTEL_EXPORTER_OTLP_ENDPOINT: "https://collector.example:4317"}`,
	"imagePullSecrets":         `[{name: registry}]`,
	"nodes.nodeSelector":       `{"example.com/storage": "true"}`,
	"nodes.nodeAffinity": `{requiredDuringSchedulingIgnoredDuringExecution:
		{nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: DoesNotExist}]}]}}`,
	"nodes.tolerations":               `[]`,
	"nodes.priorityClassName":         `""`,
	"nodes.maxUnavailable":            `10%`,
	"csiNode.image.repository":        `registry.example:5000/crust-csi/csi-node`,
	"csiNode.image.tag":               `"1"`,
	"csiNode.image.pullPolicy":        `Always`,
	"csiNode.resources":               `{limits: {memory: 1Gi, cpu: 0.5}}`,
	"csiNode.podAnnotations":          `{prometheus.io/scrape: "true"}`,
	"csiNode.fsGroupPolicy":           `File`,
	"csiNode.idmapProbe":              `false`,
	"csiNode.runtimeAssistedMounts":   `false`,
	"provisioner.image.repository":    `registry.example/csi-provisioner`,
	"provisioner.image.tag":           `v7`,
	"provisioner.image.pullPolicy":    `Never`,
	"provisioner.resources":           `{requests: {memory: 1Gi}}`,
	"snapshotter.image.repository":    `registry.example/csi-snapshotter`,
	"snapshotter.image.tag":           `v9`,
	"snapshotter.image.pullPolicy":    `Never`,
	"snapshotter.resources":           `{requests: {memory: 1Gi}}`,
	"resizer.replicas":                `2`,
	"resizer.image.repository":        `registry.example/csi-resizer`,
	"resizer.image.tag":               `v3`,
	"resizer.image.pullPolicy":        `Never`,
	"resizer.resources":               `{requests: {memory: 1Gi}}`,
	"resizer.nodeSelector":            `{a: b}`,
	"resizer.tolerations":             `[]`,
	"resizer.priorityClassName":       `""`,
	"steward.replicas":                `2`,
	"steward.image.repository":        `registry.example/csi-steward`,
	"steward.image.tag":               `v3`,
	"steward.image.pullPolicy":        `Never`,
	"steward.resources":               `{requests: {memory: 1Gi}}`,
	"steward.nodeSelector":            `{a: b}`,
	"steward.tolerations":             `[]`,
	"steward.priorityClassName":       `""`,
	"crust.enabled":                   `false`,
	"crust.allowDevices":              `["/dev/disk/by-id/a"]`,
	"crust.installDir":                `/var/opt/crust`,
	"crust.nriSocket":                 `/var/run/nri/nri.sock`,
	"crust.storageClasses":            `[]`,
	"crust.runtimeClass.nodeSelector": `{a: b}`,
	"crust.runtimeClass.tolerations":  `[{key: a, effect: NoExecute, operator: Exists, tolerationSeconds: 3}]`,
	"crust.crustd.image.repository":   `registry.example/crustd`,
	"crust.crustd.image.tag":          `v1@sha256:` + `0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef`,
	"crust.crustd.image.pullPolicy":   `IfNotPresent`,
	"crust.crustd.resources":          `{requests: {memory: 1Gi}}`,
	"crust.crustd.podAnnotations":     `{a: b}`,
	"crust.crustd.timeout":            `2m`,
	"crust.crustd.ownershipTimeout":   `1h`,
	"crust.agent.image.repository":    `registry.example/crust-agent`,
	"crust.agent.image.tag":           `v1`,
	"crust.agent.image.pullPolicy":    `IfNotPresent`,
	"crust.agent.resources":           `{requests: {memory: 1Gi}}`,
	"crust.agent.podAnnotations":      `{a: b}`,

	"crust.microVM.enabled":                   `false`,
	"crust.microVM.image.repository":          `registry.example/crustd-vm`,
	"crust.microVM.image.tag":                 `v1`,
	"crust.microVM.image.pullPolicy":          `IfNotPresent`,
	"crust.microVM.resources":                 `{requests: {memory: 1Gi}}`,
	"crust.microVM.podAnnotations":            `{a: b}`,
	"crust.microVM.guestDir":                  `/var/opt/crust/guest`,
	"crust.microVM.timeout":                   `60s`,
	"crust.microVM.ownershipTimeout":          `1h`,
	"crust.microVM.runtimeClass.nodeSelector": `{a: b}`,
	"crust.microVM.runtimeClass.tolerations":  `[{key: a, operator: Exists}]`,
	"crust.microVM.runtimeClass.overhead":     `{memory: 1Gi}`,
}

// defaults are values.yaml, flat: by paths such as crust.enabled.
func defaults(t *testing.T) map[string]any {
	t.Helper()
	b, err := os.ReadFile(chart + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	all := values{}
	if err := yaml.UnmarshalStrict(b, &all); err != nil {
		t.Fatal(err)
	}
	leaves := map[string]any{}
	flatten(leaves, "", all, schema(t))
	return leaves
}

// flatten goes down where the schema names the keys, and no optional ones.
func flatten(leaves map[string]any, path string, v any, schema values) {
	m, isMap := v.(values)
	properties, _ := resolve(schema)["properties"].(values)
	if required, _ := resolve(schema)["required"].([]any); !isMap || properties == nil || len(required) == 0 {
		leaves[path] = v
		return
	}
	for key, below := range m {
		s, _ := properties[key].(values)
		flatten(leaves, strings.TrimPrefix(path+"."+key, "."), below, s)
	}
}

var root values

func schema(t *testing.T) values {
	t.Helper()
	b, err := os.ReadFile(chart + "/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	root = values{}
	if err := json.Unmarshal(b, &root); err != nil {
		t.Fatal(err)
	}
	return root
}

func resolve(schema values) values {
	if ref := text(schema["$ref"]); ref != "" {
		return at(root, "definitions", strings.TrimPrefix(ref, "#/definitions/")).(values)
	}
	return schema
}

// changed are the values of an installation that has everything, with that one other.
func changed(t *testing.T, path string) values {
	t.Helper()
	var v any
	if err := yaml.UnmarshalStrict([]byte(other[path]), &v); err != nil {
		t.Fatal(path, err)
	}
	if path == "crust.enabled" { // without CRUST there are no microVMs
		return with(crust, path, v)
	}
	return with(microVM, path, v)
}

// A value that changes nothing is a promise that is not kept, and one that makes an
// object which Kubernetes or a program refuses is worse. What the API server takes no
// change of stays, so that every upgrade is possible.
func TestEveryValueHasAnEffectAndAnUpgradeIsPossible(t *testing.T) {
	before := render(t, namespace, microVM)
	for _, object := range before {
		runs(t, "defaults", object)
	}
	seen := map[string]bool{}
	for path := range defaults(t) {
		if other[path] == "" {
			t.Errorf("%s: the test has no other value", path)
			continue
		}
		seen[path] = true
		after := render(t, namespace, changed(t, path))
		if cmp.Equal(before, after) {
			t.Errorf("%s: %s changes nothing", path, other[path])
		}
		for key, object := range after {
			for _, field := range fixed[text(object["kind"])] {
				if old := before[key]; old != nil && !cmp.Equal(at(old, field...), at(object, field...)) {
					t.Errorf("%s changes %v of %s: the API server refuses that", path, field, key)
				}
			}
			if !cmp.Equal(before[key], object) {
				runs(t, path, object)
			}
		}
	}
	for path := range other {
		if !seen[path] {
			t.Errorf("%s is no value", path)
		}
	}
}

// fixed are the fields that the API server takes no change of, by kind.
var fixed = map[string][][]any{
	"CSIDriver":          {{"spec", "attachRequired"}, {"spec", "volumeLifecycleModes"}},
	"StorageClass":       {{"provisioner"}, {"parameters"}, {"reclaimPolicy"}, {"volumeBindingMode"}},
	"RuntimeClass":       {{"handler"}},
	"DaemonSet":          {{"spec", "selector"}},
	"Deployment":         {{"spec", "selector"}},
	"ClusterRoleBinding": {{"roleRef"}},
	"RoleBinding":        {{"roleRef"}},
}

// runs has the programs of this project read the arguments that they would be given.
func runs(t *testing.T, path string, object values) {
	t.Helper()
	container := at(object, "spec", "template", "spec", "containers", 0)
	name := text(at(container, "name"))
	if !slices.Contains(ours, name) {
		return
	}
	var args []string
	for _, a := range at(container, "args").([]any) {
		args = append(args, text(a))
	}
	program := exec.Command(filepath.Join(programs(t), name), append(args, "--version")...)
	program.Env = append(os.Environ(), "NODE_NAME=n")
	if out, err := program.CombinedOutput(); err != nil {
		t.Errorf("%s: %s %v: %v %s", path, name, args, err, out)
	}
}

var (
	ours  = []string{"csi-node", "crustd", "crust-agent"}
	built string
)

// programs is a directory with them. TestMain removes it.
func programs(t *testing.T) string {
	t.Helper()
	if built == "" {
		dir, err := os.MkdirTemp("", "crust-csi-helm")
		if err != nil {
			t.Fatal(err)
		}
		args := []string{"build", "-C", "../..", "-o", dir + "/"}
		for _, name := range ours {
			args = append(args, "./cmd/"+name)
		}
		built = dir
		if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	return built
}

// What templates leave out because it is the program's own default has to be that.
func TestFlagsThatAreLeftOutAreTheDefaults(t *testing.T) {
	all := defaults(t)
	for flag, path := range map[string]string{
		"csi-node -log-format":              "log.format",
		"csi-node -v":                       "log.verbosity",
		"csi-node -fsgroup-policy":          "csiNode.fsGroupPolicy",
		"csi-node -idmap-probe":             "csiNode.idmapProbe",
		"csi-node -runtime-assisted-mounts": "csiNode.runtimeAssistedMounts",
		"crustd -log-format":                "log.format",
		"crustd -v":                         "log.verbosity",
		"crustd -timeout":                   "crust.crustd.timeout",
		"crustd -ownership-timeout":         "crust.crustd.ownershipTimeout",
		"crust-agent -log-format":           "log.format",
		"crust-agent -v":                    "log.verbosity",
	} {
		program, flag, _ := strings.Cut(flag, " ")
		help, _ := exec.Command(filepath.Join(programs(t), program), "-h").CombinedOutput()
		m := regexp.MustCompile(`(?m)^  ` + flag + `\b.*\n.*\(default "?(.*?)"?\)$`).FindSubmatch(help)
		if m == nil {
			t.Errorf("%s has no %s with a default", program, flag)
			continue
		}
		want := strings.Trim(mustJSON(t, all[path]), `"`)
		if d, err := time.ParseDuration(want); err == nil {
			want = d.String()
		}
		if string(m[1]) != want {
			t.Errorf("%s is %s, and %s of %s is %s", path, want, flag, program, m[1])
		}
	}
}

// Flags that no installation sets, with the reason.
var unset = map[string]string{
	"csi-node -check-config":         "it is for people",
	"csi-node -driver-name":          "the admission policies and roles are of csi.crust.dev",
	"crustd -kata-runtime":           "the chart's are crustds for mount namespaces and for its own microVMs",
	"crustd -kata-file-systems":      "as -kata-runtime",
	"csi-node -host-mount-namespace": "the default is the host's, by hostPID",
	"csi-node -version":              "",
	"crustd -allow-uid":              "crust-agent is root",
	"crustd -version":                "",
	"crust-agent -node-name":         "the environment has it",
	"crust-agent -kubeconfig":        "it is a pod",
	"crust-agent -version":           "",
}

func TestEveryFlagIsSetOrHasAReasonNotToBe(t *testing.T) {
	given := map[string]bool{}
	for path := range other {
		for _, object := range render(t, namespace, changed(t, path)) {
			container := at(object, "spec", "template", "spec", "containers", 0)
			args, _ := at(container, "args").([]any)
			for _, a := range args {
				flag, _, _ := strings.Cut(strings.TrimLeft(text(a), "-"), "=")
				given[text(at(container, "name"))+" -"+flag] = true
			}
		}
	}
	n := 0
	for _, program := range ours {
		help, _ := exec.Command(filepath.Join(programs(t), program), "-h").CombinedOutput()
		for _, m := range regexp.MustCompile(`(?m)^  (-[a-z-]+)`).FindAllSubmatch(help, -1) {
			n++
			flag := program + " " + string(m[1])
			if _, reason := unset[flag]; given[flag] == reason {
				t.Errorf("%s: given: %v, and with a reason not to be: %v", flag, given[flag], reason)
			}
		}
	}
	if n < 30 {
		t.Errorf("%d flags", n)
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
