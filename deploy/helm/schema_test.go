package helm_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// The schema knows the values of values.yaml, no others, and all of them are needed: a
// null takes one away.
func TestTheSchemaHasTheValues(t *testing.T) {
	b, err := os.ReadFile(chart + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	all := values{}
	if err := yaml.UnmarshalStrict(b, &all); err != nil {
		t.Fatal(err)
	}
	agree(t, "", all, schema(t))
	closed(t, "", root)
}

func agree(t *testing.T, path string, v values, schema values) {
	t.Helper()
	schema = resolve(schema)
	properties, _ := schema["properties"].(values)
	required, _ := schema["required"].([]any)
	if properties == nil || len(required) == 0 {
		return // of Kubernetes, or without defaults
	}
	for key := range properties {
		if _, ok := v[key]; (!ok || !slices.Contains(required, any(key))) && key != "global" {
			t.Errorf("%s.%s: in values.yaml: %v; required: %v", path, key, ok, required)
		}
	}
	for key, below := range v {
		s, ok := properties[key].(values)
		if !ok {
			t.Errorf("%s.%s is not in the schema", path, key)
		} else if m, ok := below.(values); ok {
			agree(t, path+"."+key, m, s)
		}
	}
}

// closed checks whether every object of the schema says what it may hold.
func closed(t *testing.T, path string, v any) {
	t.Helper()
	switch v := v.(type) {
	case values:
		if v["type"] == "object" && v["additionalProperties"] == nil && !strings.HasSuffix(path, "/global") {
			t.Errorf("%s may hold anything", path)
		}
		for key, below := range v {
			closed(t, path+"/"+key, below)
		}
	case []any:
		for _, below := range v {
			closed(t, path, below)
		}
	}
}

// What is wrong is refused before anything is installed, and the message names it.
func TestWrongValuesAreRefused(t *testing.T) {
	for set, want := range map[string]string{
		`{pool: []}`:                                                        `additional properties 'pool' not allowed`,
		`{csiNode: {resource: {}}}`:                                         `at '/csiNode': additional properties 'resource' not allowed`,
		`{crust: {agent: {image: {tga: a}}}}`:                               `at '/crust/agent/image': additional properties 'tga' not allowed`,
		`{pools: [{name: a}]}`:                                              `at '/pools/0': missing property 'path'`,
		`{pools: [{name: A, path: /a}]}`:                                    `at '/pools/0/name': 'A' does not match pattern`,
		`{pools: [{name: a, path: a}]}`:                                     `at '/pools/0/path': 'a' does not match pattern`,
		`{pools: [{name: a, path: /a/../b}]}`:                               `at '/pools/0/path'`,
		`{pools: [{name: a, path: "/a,b"}]}`:                                `at '/pools/0/path'`,
		`{pools: [{name: a, path: "/a", overcommit: 0.5}]}`:                 `at '/pools/0/overcommit'`,
		`{pools: null}`:                                                     `missing property 'pools'`,
		`{pools: default}`:                                                  `at '/pools': got string, want array`,
		`{kubeletDir: 3}`:                                                   `at '/kubeletDir': got number, want string`,
		`{allowDevices: ["/dev/[a"]}`:                                       `at '/allowDevices/0'`,
		`{allowDevices: [sda]}`:                                             `at '/allowDevices/0'`,
		`{log: {verbosity: high}}`:                                          `at '/log/verbosity': got string, want integer`,
		`{log: {verbosity: 6}}`:                                             `at '/log/verbosity': maximum`,
		`{log: {format: xml}}`:                                              `at '/log/format': value must be one of 'text', 'json'`,
		`{snapshots: {enabled: "yes"}}`:                                     `at '/snapshots/enabled': got string, want boolean`,
		`{csiDriver: {fsGroupPolicy: Mount}}`:                               `at '/csiDriver/fsGroupPolicy': value must be one of`,
		`{storageClasses: [{name: a, parameters: {fsType: ext4}}]}`:         `additional properties 'fsType' not allowed`,
		`{storageClasses: [{name: a, parameters: {provisioning: thik}}]}`:   `parameters/provisioning': value must be one of 'thin', 'thick'`,
		`{csiNode: {resources: {limits: {memory: many}}}}`:                  `at '/csiNode/resources/limits/memory'`,
		`{nodes: {tolerations: [{operator: Exists, value: a}]}}`:            `at '/nodes/tolerations/0/value'`,
		`{nodes: {nodeAffinity: {requiredDuringScheduling: {}}}}`:           `additional properties 'requiredDuringScheduling' not allowed`,
		`{nodes: {nodeSelector: {a: true}}}`:                                `at '/nodes/nodeSelector/a': got boolean, want string`,
		`{nodes: {maxUnavailable: 0}}`:                                      `at '/nodes/maxUnavailable'`,
		`{resizer: {replicas: -1}}`:                                         `at '/resizer/replicas': minimum`,
		`{crust: {nriSocket: /nri.sock}}`:                                   `at '/crust/nriSocket'`,
		`{crust: {crustd: {timeout: 60}}}`:                                  `at '/crust/crustd/timeout': got number, want string`,
		`{pools: [], storageClasses: []}`:                                   `pools and allowDevices are both empty`,
		`{pools: [], allowDevices: [/dev/sda]}`:                             `crust-ext4 has no pool to make volumes in`,
		`{pools: [{name: a, path: /a}]}`:                                    `the pool default of crust-ext4 is not among pools (a)`,
		`{pools: [{name: default, path: /a}, {name: default, path: /b}]}`:   `default is there twice`,
		`{pools: [{name: default, path: /a}, {name: b, path: /a/b}]}`:       `the directory /a/b of pool b is inside the directory /a of pool default`,
		`{pools: [{name: default, path: /dev/pool}]}`:                       `/dev/pool of default is inside /dev`,
		`{pools: [{name: default, path: /a}, {name: b, path: /a}]}`:         `the directory /a of b is that of pool default`,
		`{pools: [{name: default, path: /a}, {name: b, path: /dev}]}`:       `the directory /dev of b is that of csi-node`,
		`{pools: [{name: default, path: /mnt/ab/c, disk: /mnt/a}]}`:         `the path /mnt/ab/c of default is not below its disk /mnt/a`,
		`{kubeletDir: /run}`:                                                `kubeletDir: /run is a directory of csi-node`,
		`{storageClasses: [{name: a}, {name: a}]}`:                          `a is there twice`,
		`{storageClasses: [{name: crust-sandbox}], crust: {enabled: true}}`: `crust-sandbox is there twice`,
		`{crust: {enabled: true, nriSocket: /run/crust/nri.sock}}`:          `/run/crust is a directory of crust-agent`,
		`{crust: {microVM: {enabled: true}}}`:                               `pods in microVMs need crust.enabled, too`,
		`{crust: {microVM: {runtimeClass: {overhead: {gpu: 1}}}}}`:          `invalid propertyName 'gpu'`,

		`{storageClasses: [{name: a, parameters: {csi.storage.k8s.io/fstype: ""}}]}`: `fstype': minLength`,
		`{storageClasses: [{name: a, parameters: {csi.storage.k8s.io/fstype: 4}}]}`:  `fstype': got number, want string`,

		`{nodes: {nodeSelector: {kubernetes.io/arch: arm64}}, crust: {enabled: true, microVM: {enabled: true}}}`: `microVMs are for`,
	} {
		_, err := template(t, chart, namespace, read(set))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", set, err, want)
		}
	}
}

var row = regexp.MustCompile("(?m)^\\| `([^`]+)` \\| `([^`]*)` \\| (.+) \\|$")

// README.md has a row for every value, with its default where that is short.
func TestTheReadmeHasEveryValue(t *testing.T) {
	page, err := os.ReadFile(chart + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	all := defaults(t)
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		v, ok := all[m[1]]
		if !ok {
			t.Errorf("%s is no value, or is there twice", m[1])
		}
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		got := string(b)
		if s, ok := v.(string); ok && s != "" {
			got = s
		}
		if m[2] != got && (len(got) < 60 || m[2] != "see values.yaml") {
			t.Errorf("%s: the default is %s, and not %s", m[1], got, m[2])
		}
		delete(all, m[1])
	}
	for path := range all {
		t.Errorf("%s is not described", path)
	}
	schema(t)
	for _, list := range []string{"pool", "storageClass"} {
		comments, err := os.ReadFile(chart + "/values.yaml")
		if err != nil {
			t.Fatal(err)
		}
		for key := range at(root, "definitions", list, "properties").(values) {
			if !regexp.MustCompile(`(?m)^#   ` + key + ` `).Match(comments) {
				t.Errorf("values.yaml does not say what %s of a %s is", key, list)
			}
		}
	}
}

func TestTheReadmesExample(t *testing.T) {
	page, err := os.ReadFile(chart + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllSubmatch(page, -1)
	if len(blocks) == 0 {
		t.Error("no example")
	}
	for _, b := range blocks {
		render(t, namespace, read(string(b[1])))
	}
}

// Links of README.md lead somewhere.
func TestTheReadmesLinks(t *testing.T) {
	page, err := os.ReadFile(chart + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`).FindAllStringSubmatch(string(page), -1) {
		if _, err := os.Stat(filepath.Join(chart, m[1])); err != nil {
			t.Error(err)
		}
	}
}
