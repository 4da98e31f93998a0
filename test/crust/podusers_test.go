package crust

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/podguest"
	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// firstID is the host's id of a pod's root, and ids is how many ids the pod has.
const firstID, ids = 1_300_000, 65536

func mappings() []any {
	return []any{map[string]any{"containerID": 0, "hostID": firstID, "size": ids}}
}

// users gives a container users of its own, as containerd does for hostUsers: false. A container of a pod joins the namespace of process.
func (s spec) users(process int) spec {
	l := s["linux"].(map[string]any)
	own := map[string]any{"type": "user"}
	if process != 0 {
		own["path"] = fmt.Sprintf("/proc/%d/ns/user", process)
	}
	l["namespaces"] = append(l["namespaces"].([]any), own)
	l["uidMappings"], l["gidMappings"] = mappings(), mappings()
	return s
}

// mapped has a mount show the ids of its file system as the pod's.
func mapped(mount map[string]any) map[string]any {
	mount["uidMappings"], mount["gidMappings"] = mappings(), mappings()
	return mount
}

func owner(t testing.TB, path string) string {
	t.Helper()
	return strings.TrimSpace(run(t, "stat", "-c", "%u:%g", path))
}

// With hostUsers: false, root of a pod in a microVM is not root on the host, and neither is the program that serves its files. Its image
// belongs to the ids that the host gave the pod. What it is given, and its volume, keep the pod's.
func TestU04_C24_APodInAMicroVMHasUsersOfItsOwn(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	v := s.Volume("v", "ext4")
	p := s.pod("users", v)
	ok(t, s.nodePublish(p))
	pause := r.podOf(t, p.name, "", r.spec(t, p.name, "sandbox", "/bin/busybox", "sleep", "100000").users(0))
	ok(t, s.runtimePublish(p))
	if got := run(t, "cat", fmt.Sprintf("/proc/%d/uid_map", pause.process.Pid)); !strings.Contains(got, fmt.Sprintf(" %d ", firstID)) {
		t.Errorf("the pod's own container has the users %s", got)
	}
	given, foreign := t.TempDir(), t.TempDir()
	ok(t, os.WriteFile(given+"/f", []byte("given\n"), 0o600))
	ok(t, os.WriteFile(foreign+"/secret", []byte("of the host\n"), 0o600))
	one, err := r.start(t, "one", r.spec(t, p.name, "container", "/bin/busybox", "sh", "-c",
		`echo $(id -u) $(stat -c %u:%g /bin/busybox /given/f /data); cat /given/f; touch /made /given/made; chown 7:8 /given/made
		echo last > /data/last; stat -c %u:%g /given/made /data/last; echo up; busybox sleep 100000`).users(pause.process.Pid).
		add(mount("/data", "bind", p.target, "rbind"), mapped(mount("/given", "bind", given, "rbind")),
			mount("/foreign", "bind", foreign, "rbind")))
	ok(t, err)
	eventually(t, testcrust.Longest(), "it runs", func() bool { return strings.Contains(one.text(t), "up") })
	if got := one.text(t); got != "0 0:0 0:0 0:0\ngiven\n7:8\n0:0\nup\n" {
		t.Errorf("in the container: %q", got)
	}
	for path, want := range map[string]string{
		filepath.Join(one.bundle, "rootfs/made"): fmt.Sprintf("%d:%d", firstID, firstID), given + "/made": "7:8",
	} {
		if got := owner(t, path); got != want {
			t.Errorf("on the host, %s belongs to %s, not to %s", path, got, want)
		}
	}
	// All rights in the guest are no rights over what belongs to the host's root.
	guest := &machine{t: t, s: s, id: p.name}
	if out, err := guest.Exec("id -u; cd " + podguest.Shared + "/" + podguest.Common + "; cat */secret; rm */secret"); err == nil ||
		!strings.HasPrefix(out, "0\n") || strings.Contains(out, "of the host") || !strings.Contains(out, "Permission denied") {
		t.Errorf("the guest's root reads a file of the host's: %v %s", err, out)
	}
	if _, err := os.Stat(foreign + "/secret"); err != nil {
		t.Error(err)
	}
	monitor := strings.TrimSpace(run(t, "pgrep", "-f", "pod-monitor "+filepath.Join(r.pods, p.name)+"$"))
	server := strings.TrimSpace(run(t, "pgrep", "-P", monitor, "-x", "virtiofsd"))
	if got := owner(t, "/proc/"+server+"/ns"); got != fmt.Sprintf("%d:%d", firstID, firstID) {
		t.Errorf("virtiofsd runs as %s", got)
	}
	if _, err := r.start(t, "two", r.spec(t, p.name, "container", "/bin/busybox", "true").users(pause.process.Pid).
		add(mapped(mount("/proc/x", "bind", "/proc", "rbind")))); err == nil || !strings.Contains(err.Error(), "cannot map the ids") {
		t.Errorf("a file system whose ids cannot be mapped: %v", err)
	}
	r.end(t, pause)
	if status := one.wait(t); status != 137 {
		t.Errorf("the pod's end: %d", status)
	}
	s.lastOnTheHost(t, p, v)
	r.delete(t, "one")

	// Its virtiofsd ends with its monitor, whatever ends that.
	again := r.podOf(t, "again", "", r.spec(t, "again", "sandbox", "/bin/busybox", "sleep", "100000").users(0))
	monitor = strings.TrimSpace(run(t, "pgrep", "-f", "pod-monitor "+filepath.Join(r.pods, "again")+"$"))
	server = strings.TrimSpace(run(t, "pgrep", "-P", monitor, "-x", "virtiofsd"))
	run(t, "kill", "-KILL", monitor)
	eventually(t, testcrust.Longest(), "virtiofsd has ended", func() bool {
		state := run(t, "sh", "-c", "ps -o stat= -p "+server+" || true") // this process may have to wait for it
		return state == "" || strings.HasPrefix(state, "Z")
	})
	r.end(t, again)
}
