// Package byhand types the commands of the documents that need no cluster, as a newcomer does: with the default sockets and
// directories.
package byhand

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

const project = "../.."

// block returns the first block of commands after a heading.
func block(t *testing.T, page, heading string) string {
	t.Helper()
	b, err := os.ReadFile(project + "/" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(b), "\n"+heading+"\n")
	m := regexp.MustCompile("(?ms)^```(?:sh)?\n(.*?)^```$").FindStringSubmatch(after)
	if !ok || m == nil {
		t.Fatalf("%s has no commands after %q", page, heading)
	}
	return m[1]
}

// replaced replaces a part of the commands, which must be there.
func replaced(t *testing.T, commands, old, now string) string {
	t.Helper()
	if strings.Count(commands, old) != 1 {
		t.Fatalf("the commands have %q %d times:\n%s", old, strings.Count(commands, old), commands)
	}
	return strings.Replace(commands, old, now, 1)
}

// types runs commands in namespaces of their own, with empty /var/lib and /run, and returns what they print. It runs alone: the new
// mount namespace has copies of all mounts.
func types(t *testing.T, commands string) string {
	t.Helper()
	script := `mount -t tmpfs none /var/lib && mount -t tmpfs none /run
` + commands + `
jobs -p | while read -r p; do kill "$p" 2>/dev/null || true; done
wait
if grep /var/lib/kubelet/ /proc/self/mountinfo; then echo "that is still mounted"; exit 1; fi`
	c := exec.Command("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "--kill-child",
		"bash", "-euo", "pipefail", "-c", script)
	c.Dir = project
	out, err := c.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("%v:\n%s", err, commands)
	}
	return string(out)
}

func wants(t *testing.T, out string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(out, w) {
			t.Errorf("%q is not shown", w)
		}
	}
}

// A person waits for a second until the daemons serve. A busy machine takes longer.
const (
	aSecond = "sleep 1; "
	serves  = "until bin/crustctl volume list >/dev/null 2>&1; do sleep 0.1; done; "
)

// README.md: a volume from its creation to its deletion.
func TestTheReadmesCommands(t *testing.T) {
	c := block(t, "README.md", "## Use it")
	c = replaced(t, c, "make setup build", "make build")
	c = replaced(t, c, aSecond, serves)
	create := regexp.MustCompile(`(?m)^(bin/crustctl volume create [^#\n]*).*$`)
	c = create.ReplaceAllString(c, `shown=$$($1); echo "$$shown"; made=$$(grep -o 'default\.v[0-9a-f]*' <<<"$$shown" | head -n 1)`)
	c = regexp.MustCompile(`\bID\b`).ReplaceAllString(c, `"$$made"`)
	wants(t, types(t, c), "default.v", "/var/lib/kubelet/pods/me/mount", "openat2")
}

// docs/sandboxes.md: a volume in a microVM, and in a mount namespace.
func TestTheSandboxesCommands(t *testing.T) {
	for _, kind := range []string{"qemu", "namespace"} {
		t.Run(kind, func(t *testing.T) {
			c := block(t, "docs/sandboxes.md", "## By hand")
			c = replaced(t, c, "make build guest", "make build")
			c = replaced(t, c, aSecond, serves+"until bin/crustctl sandbox list >/dev/null 2>&1; do sleep 0.1; done; ")
			want := []string{"published"}
			if kind == "namespace" {
				c = replaced(t, c, "--backend qemu", "--backend namespace")
				c = replaced(t, c, "sandbox run demo ", "sandbox run demo --kind namespace ")
				c = replaced(t, c, "bin/crustctl sandbox exec demo df -h", "bin/crustctl sandbox exec demo df -h || true")
				want = append(want, "nsenter")
			}
			wants(t, types(t, c), want...)
		})
	}
}
