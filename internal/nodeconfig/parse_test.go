package nodeconfig

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

const head = "apiVersion: csi.crust.dev/v1alpha1\nkind: NodeConfig\n"

const whole = head + `
logging: {verbosity: 4}
allowDevices: [/dev/disk/by-id/a-*]
pools:
  - {name: default, path: /var/lib/crust-csi/pool}
nodes:
  - name: nvme
    selector: {matchLabels: {example.com/disk: nvme}}
    pools:
      - {name: fast, path: /mnt/nvme/crust-csi/, overcommit: 1.5, reserve: 1Gi}
      - {name: default, path: /var/lib/crust-csi/pool}
  - name: diskless
    selector:
      matchExpressions: [{key: example.com/disk, operator: DoesNotExist}, {key: zone, operator: In, values: [a, b]}]
    pools: []
    allowDevices: [/dev/mapper/*]
`

func mustParse(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse([]byte(text))
	if err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	return c
}

func TestWhatANodeIsGiven(t *testing.T) {
	fallback := Pool{Name: "default", Dir: "/var/lib/crust-csi/pool"}
	top := []string{"/dev/disk/by-id/a-*"}
	for _, c := range []struct {
		labels map[string]string
		want   Settings
	}{
		{map[string]string{"example.com/disk": "hdd"}, Settings{"", []Pool{fallback}, top, 4}},
		{map[string]string{"example.com/disk": "nvme", "zone": "a"},
			Settings{"nvme", []Pool{{"fast", "/mnt/nvme/crust-csi", 1.5, 1 << 30}, fallback}, top, 4}},
		{map[string]string{"zone": "b"}, Settings{"diskless", []Pool{}, []string{"/dev/mapper/*"}, 4}},
		{map[string]string{"zone": "c"}, Settings{"", []Pool{fallback}, top, 4}},
	} {
		if got, err := mustParse(t, whole).choose(c.labels); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %+v, %v", c.labels, got, err)
		}
	}
}

// A node that no entry matches gets the top level's pools, if the top level has any.
func TestANodeThatNoEntryMatches(t *testing.T) {
	const nodes = "\nnodes: [{name: a, selector: {matchLabels: {disk: a}, matchExpressions: [{key: gpu, operator: Exists}]}, pools: []}]"
	for top, word := range map[string]string{"": "label the node", "allowDevices: [/dev/a]": "label the node", "pools: []": ""} {
		_, err := mustParse(t, head+top+nodes).choose(map[string]string{"disk": "b", "kubernetes.io/hostname": "n"})
		if word == "" && err != nil || word != "" && (err == nil || !strings.Contains(err.Error(), word)) {
			t.Errorf("%q: %v", top, err)
		}
		// The message needs the node's values of the relevant labels, and nothing else.
		if err != nil && (!strings.Contains(err.Error(), "has disk=b and lacks the label gpu") ||
			strings.Contains(err.Error(), "hostname")) {
			t.Errorf("%v", err)
		}
	}
}

func TestANodeThatTwoEntriesMatch(t *testing.T) {
	c := mustParse(t, head+`
pools: [{name: p, path: /p}]
nodes:
  - {name: one, selector: {matchLabels: {a: b}}, pools: []}
  - {name: two, selector: {matchExpressions: [{key: c, operator: Exists}]}, allowDevices: [/dev/x]}
  - {name: three, selector: {matchLabels: {a: z}}, pools: []}`)
	_, err := c.choose(map[string]string{"a": "b", "c": "d"})
	if err == nil || !strings.Contains(err.Error(), `"one", "two" of nodes all match`) || !strings.Contains(err.Error(), "a=b, c=d") {
		t.Errorf("%v", err)
	}
	s, err := c.choose(map[string]string{"c": "d"})
	if err != nil || s.Entry != "two" || len(s.Pools) != 1 || !slices.Equal(s.AllowDevices, []string{"/dev/x"}) {
		t.Errorf("an entry replaces what it says and nothing else: %+v, %v", s, err)
	}
}

// Each error names the key and the solution, in one line.
func TestTheFileIsReadStrictly(t *testing.T) {
	const entry = head + "nodes: [{name: a, "
	for _, c := range [][2]string{
		{"", "the file is empty; it begins with apiVersion"},
		{"# nothing\n", "the file is empty"},
		{"- a", "no map"},
		{"a: b: c", "mapping values"},
		{"apiVersion: [a]", "apiVersion is a array and has to be text"},
		{
			"apiVersion: v1\nkind: NodeConfig\nother: 1",
			`apiVersion "v1" and kind "NodeConfig"; this csi-node knows apiVersion: csi.crust.dev/v1`,
		},
		{"apiVersion: csi.crust.dev/v1alpha1\nkind: Config", `kind "Config"`},
		{"pools: []", `apiVersion ""`},
		{head + "pool: []", "pool is not known; known there are apiVersion, kind, logging, pools, allowDevices, nodes"},
		{head + "Pools: []", "the key Pools is not known"},
		{head + "pools: []\nPools: []", "the key Pools is not known"},
		{head + "pools: []\npools: []", `line 4: the key "pools" is there twice`},
		{head + "pools: [{name: a, path: /a, path: /b}]", `the key "path" is there twice`},
		{
			head + "pools: [{name: a, path: /a, overcomit: 2}]",
			"pools[0].overcomit is not known; known there are name, path, overcommit, reserve",
		},
		{head + "logging: {v: 2}", "the key logging.v is not known; known there are verbosity"},
		{entry + "selector: {matchLabel: {a: b}}}]", "nodes[0].selector.matchLabel is not known; known there are matchLabels, matchExp"},
		{entry + "selector: {matchExpressions: [{keys: a}]}}]", "known there are key, operator, values"},
		{head + "---\npools: []", "second document"},
		{head + "...\npools: []", "second document"},
		{head + "pools:", "pools has no value"},
		{head + "pools: [null]", "pools[0] has no value"},
		{head + "logging: {verbosity: ~}", "logging.verbosity has no value"},
		{head + "1: a", "write it in quotes"},
		{head + "logging: {verbosity: high}", "logging.verbosity is a string and has to be a whole number"},
		{head + "logging: {verbosity: 2.5}", "has to be a whole number"},
		{head + "logging: {verbosity: 6}", "from 0 to 5"},
		{head + "logging: {verbosity: -1}", "from 0 to 5"},
		{head + "pools: {name: a}", "pools is a object and has to be a list"},
		{head + "pools: [{name: a, path: a}]", `pools[0]: path "a" of pool a is no absolute`},
		{head + "pools: [{name: a}]", "no absolute"},
		{head + "pools: [{path: /a}]", "pool name"},
		{head + "pools: [{name: A, path: /a}]", "pool name"},
		{head + "pools: [{name: a, path: /a, overcommit: 0.5}]", "overcommit of pool a: the value must be a number from 1"},
		{head + "pools: [{name: a, path: /a, overcommit: 0}]", "overcommit of pool a"},
		{head + "pools: [{name: a, path: /a, overcommit: \"2\"}]", "has to be a number"},
		{head + "pools: [{name: a, path: /a, reserve: 64M}]", "reserve of pool a: the value must be a size"},
		{head + "pools: [{name: a, path: /a, reserve: \"\"}]", "reserve of pool a"},
		{head + "pools: [{name: a, path: /a, reserve: 1048576}]", "in quotes"},
		{head + "pools: [{name: a, path: /a}, {name: a, path: /b}]", "the pool a is there twice"},
		{head + "pools: [{name: a, path: /a}, {name: b, path: /a/}]", "the pools a and b have one directory, /a"},
		{head + "pools: [{name: a, path: /a/b}, {name: b, path: /a}]", "the directory /a/b of pool a is inside the directory /a of pool b"},
		{head + "pools: [{name: a, path: /}, {name: b, path: /b}]", "the directory /b of pool b is inside the directory / of pool a"},
		{head + "allowDevices: [sda]", `allowDevices: "sda" is no absolute`},
		{head + "allowDevices: [\"/dev/[a\"]", "is no absolute path or pattern"},
		{entry + "selector: {matchLabels: {a: b}}}]", "gives its nodes nothing"},
		{entry + "selector: {}, pools: []}]", "it is empty"},
		{entry + "pools: []}]", "it is empty"},
		{entry + "selector: {matchLabels: {}}, pools: []}]", "it is empty"},
		{entry + "selector: {matchLabels: {a: true}}, pools: []}]", "text (write it in quotes)"},
		{entry + "selector: {matchLabels: {a: b c}}, pools: []}]", "matchLabels"},
		{entry + "selector: {matchLabels: {a b: c}}, pools: []}]", "matchLabels"},
		{entry + "selector: {matchExpressions: [{key: a, operator: in, values: [b]}]}, pools: []}]", "In, NotIn, Exists or"},
		{entry + "selector: {matchExpressions: [{key: a, operator: Gt, values: [\"1\"]}]}, pools: []}]", "In, NotIn, Exists or"},
		{entry + "selector: {matchExpressions: [{key: a, operator: In}]}, pools: []}]", "matchExpressions[0]"},
		{entry + "selector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}, pools: []}]", "matchExpressions[0]"},
		{entry + "selector: {matchLabels: {a: b}}, pools: [{name: a, path: a}]}]", `nodes[0] ("a"): pools[0]`},
		{entry + "selector: {matchLabels: {a: b}}, allowDevices: [a]}]", `nodes[0] ("a"): allowDevices`},
		{entry + "selector: {matchLabels: {a: b}}, pools: []}, " + "{name: a, selector: {matchLabels: {a: c}}, pools: []}]",
			"the same name"},
		{head + "nodes: [{selector: {matchLabels: {a: b}}, pools: []}]", "nodes[0] has no name"},
		{head + "#" + strings.Repeat("x", maxSize), "larger"},
	} {
		text, words := c[0], c[1]
		_, err := Parse([]byte(text))
		if err == nil || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.120q: %v; want %s", text, err, words)
		}
	}
}

// Devices for some nodes do not require pools in the file.
func TestEntriesWithoutPools(t *testing.T) {
	c := mustParse(t, head+"nodes: [{name: a, selector: {matchLabels: {disk: a}}, allowDevices: [/dev/a]}]")
	if s, err := c.choose(map[string]string{"disk": "b"}); err != nil || s.AllowDevices != nil || s.Pools != nil || s.Entry != "" {
		t.Errorf("%+v, %v", s, err)
	}
}

// Selectors match what those of Kubernetes would match.
func TestSelectorsAreThoseOfKubernetes(t *testing.T) {
	nodes := []map[string]string{{}, {"a": "1"}, {"a": "2", "b": ""}, {"b": "1"}, {"a": "1", "b": "2"}}
	for _, text := range []string{
		"{matchLabels: {a: '1'}}", "{matchLabels: {a: '1', b: '2'}}", "{matchLabels: {b: ''}}",
		"{matchExpressions: [{key: a, operator: In, values: ['1', '2']}]}",
		"{matchExpressions: [{key: a, operator: NotIn, values: ['1']}]}",
		"{matchExpressions: [{key: b, operator: Exists}]}", "{matchExpressions: [{key: b, operator: DoesNotExist}]}",
		"{matchLabels: {a: '1'}, matchExpressions: [{key: b, operator: DoesNotExist}]}",
		"{matchExpressions: [{key: a, operator: Exists}, {key: b, operator: NotIn, values: ['2']}]}",
	} {
		var ours Selector
		var theirs metav1.LabelSelector
		for _, v := range []any{&ours, &theirs} {
			if err := yaml.UnmarshalStrict([]byte(text), v); err != nil {
				t.Fatal(err)
			}
		}
		got, err := ours.compile()
		if err != nil {
			t.Fatal(err)
		}
		want, err := metav1.LabelSelectorAsSelector(&theirs)
		if err != nil {
			t.Fatal(err)
		}
		for _, node := range nodes {
			if got.Matches(labels.Set(node)) != want.Matches(labels.Set(node)) {
				t.Errorf("%s: %v is matched: %v", text, node, got.Matches(labels.Set(node)))
			}
		}
	}
}

// FuzzParseConfig: a parsed file stays the same when written and read again, --pool accepts each of
// its pools, and every node gets settings or an error.
func FuzzParseConfig(f *testing.F) {
	for _, s := range []string{
		whole, head, head + "pools: [{name: a, path: /a, reserve: 2Mi, overcommit: 1e3}]", head + "---\npools: []", head + "pools: ~",
		head + "allowDevices: &a [/dev/x]\nnodes: [{name: a, selector: {matchLabels: {a: b}}, allowDevices: *a}]",
		"{\"apiVersion\": \"csi.crust.dev/v1alpha1\", \"kind\": \"NodeConfig\", \"pools\": []}", head + "<<: {pools: []}",
		head + "? [a]\n: b",
	} {
		f.Add([]byte(s), "a", "b")
	}
	f.Fuzz(func(t *testing.T, b []byte, key, value string) {
		c, err := Parse(b)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("%q: more than one line: %v", b, err)
			}
			return
		}
		text, err := yaml.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(text)
		if err != nil || !reflect.DeepEqual(c, again) {
			t.Errorf("%q is %+v, and %q %+v (%v)", b, c, text, again, err)
		}
		s, err := c.choose(map[string]string{key: value})
		if err != nil {
			return
		}
		if c.Pools != nil && s.Pools == nil {
			t.Errorf("%q: the pools are gone", b)
		}
		if err := CheckPools(s.Pools); err != nil {
			t.Errorf("%q: %v", b, err)
		}
		for _, p := range s.Pools {
			if strings.ContainsAny(p.Dir, ",") {
				continue // only the file allows directories with commas
			}
			if flag, err := ParsePool(p.String()); err != nil || flag != p {
				t.Errorf("%q: %+v is not %+v (%v)", b, p, flag, err)
			}
		}
	})
}
