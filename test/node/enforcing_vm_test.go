//go:build vm

// Tests in a guest with enforcing SELinux: processes with a pod's domain and level use volumes that
// csi-node mounts with a label.

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

const enforce = "/sys/fs/selinux/enforce"

// setEnforcing makes the kernel deny what the policy does not allow ("1"), or only log it ("0").
func setEnforcing(t *testing.T, mode string) {
	t.Helper()
	ok(t, os.WriteFile(enforce, []byte(mode), 0o644))
	if got := read(t, enforce); got != mode {
		t.Fatalf("%s says %q, want %q", enforce, got, mode)
	}
}

// enforcing loads the policy for pods (test/vm/container.cil) and enforces it for the rest of the
// test.
func enforcing(t *testing.T) {
	t.Helper()
	policy, err := os.ReadFile("../../.cache/vm/container-policy")
	ok(t, err)
	ok(t, os.WriteFile("/sys/fs/selinux/load", policy, 0))
	ok(t, os.WriteFile("/proc/sys/kernel/printk_ratelimit_burst", []byte("1000000"), 0o644)) // every denial is logged
	t.Cleanup(func() { setEnforcing(t, "0") })
	setEnforcing(t, "1")
}

// confined runs a shell as a pod of that level. It returns its output and the denials that the
// kernel logged meanwhile.
func confined(t *testing.T, level, script string, args ...string) (out, denials string) {
	t.Helper()
	mark := fmt.Sprintf("%s: %s, %s", t.Name(), level, time.Now())
	ok(t, os.WriteFile("/dev/kmsg", []byte(mark+"\n"), 0))
	argv := append([]string{"system_u:system_r:svirt_t:" + level, "/bin/sh", "-c", script, "sh"}, args...)
	out = run(t, "runcon", argv...)
	_, log, found := strings.Cut(run(t, "dmesg"), mark)
	if !found {
		t.Error("the kernel's log was overwritten")
	}
	for line := range strings.Lines(log) {
		if strings.Contains(line, "avc:  denied") && strings.Contains(line, "system_r:svirt_t:"+level+" ") {
			denials += line
		}
	}
	return out, denials
}

// uses does everything that a pod does with a volume at $1. Each line says whether it worked.
const uses = `echo "process: $(tr -d '\0' </proc/self/attr/current)"
try() { if said=$(eval "$2" 2>&1); then echo "$1: yes"; else echo "$1: no: $said"; fi; }
try read 'cat <"$1/file"'
try write 'echo more >>"$1/file"'
try list 'ls "$1/"'
try create 'echo >"$1/new"'
try change 'chmod 700 "$1/file"'
try remove 'rm "$1/new"'
`

// access is how many uses work, and how many the kernel denies.
type access struct{ yes, no int }

var (
	all  = access{6, 0}
	none = access{0, 6}
	look = access{2, 3} // what was not created cannot be removed
)

// mayUse expects that a pod of that level has that access to the volume, and that the kernel's log
// names the denials.
func mayUse(t *testing.T, level, label, target string, want access) {
	t.Helper()
	out, denials := confined(t, level, strings.ReplaceAll(uses, "$1/", target+"/"))
	if want := "process: system_u:system_r:svirt_t:" + level + "\n"; !strings.HasPrefix(out, want) {
		t.Errorf("the pod is another process than %q", want)
	}
	if got := (access{strings.Count(out, ": yes\n"), strings.Count(out, "Permission denied\n")}); got != want {
		t.Errorf("level %s has the access %v, want %v, to what has the label %s:\n%s%s", level, got, want, label, out, denials)
	}
	logged := regexp.MustCompile(`denied  \{ .* tcontext=` + regexp.QuoteMeta(label) +
		` tclass=(dir|file) permissive=0`).MatchString(denials)
	if logged != (want != all) {
		t.Errorf("level %s, label %s: the kernel's log says\n%s", level, label, denials)
	}
}

// S02, enforced: the kernel gives a volume to a pod of its level, and to no other.
func TestS02_EnforcingAPodOfAnotherLevelIsDenied(t *testing.T) {
	enforcing(t)
	n := testnode.New(t, "")
	volumes := []csiclient.Volume{}
	for _, fstype := range filesystems {
		volumes = append(volumes, create(t, n, fstype, csiclient.Volume{FSType: fstype}))
	}
	dir := serveNFS(t)
	ok(t, os.Mkdir(filepath.Join(dir, "v"), 0o755))
	volumes = append(volumes, csiclient.Volume{ID: "v", Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
		Context: map[string]string{"server": "127.0.0.1", "share": "/v"}})
	for _, v := range volumes {
		name := v.FSType
		if name == "" {
			name = "nfs"
		}
		t.Run(name, func(t *testing.T) {
			target := n.Target(v.ID)
			ok(t, n.Client.Stage(ctxOf(t), labelled(v, labelA)))
			ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelA), target, false))
			ok(t, os.WriteFile(target+"/file", []byte("old\n"), 0o600))
			wantLabel(t, name, target+"/file", labelA)
			mayUse(t, "s0:c1,c2", labelA, target, all)
			for _, level := range []string{"s0:c3,c4", "s0:c1", "s0"} {
				mayUse(t, level, labelA, target, none)
			}
			if got := read(t, target+"/file"); got != "old\nmore\n" {
				t.Errorf("the file has %q", got)
			}
			// It was SELinux: the same processes succeed if it only logs.
			setEnforcing(t, "0")
			mayUse(t, "s0:c3,c4", labelA, target, all)
			setEnforcing(t, "1")
			mayUse(t, "s0:c3,c4", labelA, target, none)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))

			// The next pod has another level. No file was touched for it.
			ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelB), target, false))
			wantLabel(t, name, target+"/file", labelB)
			mayUse(t, "s0:c3,c4", labelB, target, all)
			mayUse(t, "s0:c1,c2", labelB, target, none)
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Unstage(ctxOf(t), v.ID))
		})
	}
	for _, v := range volumes[:len(filesystems)] {
		ok(t, n.Client.Delete(ctxOf(t), v.ID))
	}
}

// Without a label in the mount options a volume shows its files' labels. A pod may not write to
// them until a runtime has relabelled them through csi-node's mount. (container.cil lets pods read
// files without a label, because the guest's programs are such files.)
func TestS02_EnforcingWithoutALabelTheRuntimeRelabels(t *testing.T) {
	enforcing(t)
	n := testnode.New(t, "")
	for _, fstype := range filesystems {
		v, target := up(t, n, fstype, csiclient.Volume{FSType: fstype})
		ok(t, os.WriteFile(target+"/file", []byte("old\n"), 0o600))
		mayUse(t, "s0:c1,c2", label(t, target+"/file"), target, look)
		if line := mountLine(t, target); !strings.Contains(line, "seclabel") || strings.Contains(line, "context=") {
			t.Errorf("%s: the mount is %s", fstype, line)
		}
		run(t, "chcon", "-R", labelA, target)
		wantLabel(t, fstype, target+"/file", labelA)
		mayUse(t, "s0:c1,c2", labelA, target, all)
		mayUse(t, "s0:c3,c4", labelA, target, none)
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))

		// Labels on the disk stay, and a label of the mount hides them.
		ok(t, n.Client.Publish(ctxOf(t), labelled(v, labelB), target, false))
		mayUse(t, "s0:c3,c4", labelB, target, all)
		mayUse(t, "s0:c1,c2", labelB, target, none)
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		wantLabel(t, fstype, target+"/file", labelA)
		mayUse(t, "s0:c1,c2", labelA, target, all)
		down(t, n, v.ID, target)
	}
}

func mountLine(t *testing.T, target string) string {
	t.Helper()
	for line := range strings.Lines(mountinfo(t)) {
		if strings.Contains(line, " "+target+" ") {
			return line
		}
	}
	t.Fatalf("nothing is mounted at %s", target)
	return ""
}
