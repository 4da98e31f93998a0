package helm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// csi-node itself reads the file that the chart makes, and each node has what the values
// say.
func TestCsiNodeReadsTheConfigurationFile(t *testing.T) {
	v := with(with(nodePools, "allowDevices", []any{"/dev/disk/by-id/a-*"}), "pools", []any{values{
		"name": "default", "path": "/mnt/a/pool", "disk": "/mnt/a", "overcommit": 1.5, "reserve": "1Gi",
	}})
	v = with(v, "nodePools.directories", []any{"/mnt/crust-csi", "/var/lib/crust-csi"})
	text := text(at(render(t, namespace, v)["ConfigMap "+namespace+"/csi-node-config"], "data", "config.yaml"))
	dir := t.TempDir()
	config, labels := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "labels")
	for label, want := range map[string]string{
		"none": "--pool=default=loop:/mnt/a/pool,overcommit=1.5,reserve=1073741824\n--allow-device=/dev/disk/by-id/a-*\n-v=2\n",
		"nvme": "# entry \"nvme\" of nodes\n--pool=default=loop:/var/lib/crust-csi/pool\n--pool=fast=loop:/mnt/crust-csi/nvme\n" +
			"--allow-device=/dev/disk/by-id/a-*\n-v=2\n",
	} {
		for path, content := range map[string]string{config: text, labels: "example.com/disk=\"" + label + "\"\n"} {
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		program := exec.Command(filepath.Join(programs(t), "csi-node"), "--config", config, "--node-labels", labels, "--check-config")
		out, err := program.CombinedOutput()
		if err != nil || string(out) != want {
			t.Errorf("%s: %v\n%s\nwant:\n%s\nof:\n%s", label, err, out, want, text)
		}
	}
	page, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	example := regexp.MustCompile("(?ms)^```yaml helm\n(.*?)^```$").FindSubmatch(page)
	if example == nil {
		t.Fatal("docs/configuration.md has no example of values")
	}
	if render(t, namespace, read(string(example[1])))["ConfigMap "+namespace+"/csi-node-config"] == nil {
		t.Error("the example makes no file")
	}
	// Without entries there are flags, and no file that says the same.
	for key := range render(t, namespace, values{}) {
		if strings.HasPrefix(key, "ConfigMap") {
			t.Errorf("%s", key)
		}
	}
}

func TestWrongNodePoolsAreRefused(t *testing.T) {
	const some = "selector: {matchLabels: {a: b}}, pools: []"
	for _, c := range [][2]string{
		{`nodes: [{name: a, pools: []}]`, `missing property 'selector'`},
		{`nodes: [{name: a, selector: {}, pools: []}]`, `at '/nodePools/nodes/0/selector': minProperties`},
		{`nodes: [{name: a, selector: {matchLabels: {a: b}}}]`, `at '/nodePools/nodes/0': `},
		{`nodes: [{name: a, selector: {matchExpressions: [{key: a, operator: Gt, values: ["1"]}]}, pools: []}]`, `/operator'`},
		{`nodes: [{name: a, selector: {matchLabels: {a: b}}, pools: [{name: b, path: /b, disk: /b}]}]`, `'disk' not allowed`},
		{
			`nodes: [{name: a, selector: {matchLabels: {a: b}}, pools: [{name: b, path: /mnt/bc}]}], directories: [/mnt/b]`,
			`the path /mnt/bc of pool b of a is in none of nodePools.directories`,
		},
		{`nodes: [{name: a, ` + some + `}, {name: a, ` + some + `}]`, `a is there twice`},
		{`nodes: [{name: a, selector: {matchLabels: {a: b}}, pools: [{name: p, path: /mnt/a}, {name: p, path: /mnt/b}]}], directories: [/mnt]`,
			`a has the pool p twice`},
		{`nodes: [{name: a, selector: {matchLabels: {a: b}}, pools: [{name: p, path: /mnt/a}, {name: q, path: /mnt/a}]}], directories: [/mnt]`,
			`in a, the paths /mnt/a of pool p and /mnt/a of pool q are one`},
		{`nodes: [{name: a, selector: {matchLabels: {a: b}}, pools: [{name: p, path: /mnt/a/b}, {name: q, path: /mnt/a}]}], directories: [/mnt]`,
			`in a, the paths /mnt/a/b of pool p and /mnt/a of pool q are one, or one is inside`},
		{`directories: [/var/lib/crust-csi/pool]`, `nodePools.directories: /var/lib/crust-csi/pool is that of pool default`},
		{`directories: [/a, /a]`, `/a is that of nodePools.directories`},
		{`directories: [/etc/csi-node]`, `/etc/csi-node is that of csi-node`},
	} {
		_, err := template(t, chart, namespace, read("{nodePools: {"+c[0]+"}}"))
		if err == nil || !strings.Contains(err.Error(), c[1]) {
			t.Errorf("%s: %v; want %s", c[0], err, c[1])
		}
	}
}
