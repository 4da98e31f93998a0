package node

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// insideProgram is a static program for a container: the container has no libraries.
func insideProgram(t testing.TB) string {
	t.Helper()
	return testnode.Program{Name: "inside", Package: "./inside"}.Build(t)
}

// runtimes returns real OCI runtimes: Debian's crun, and the runc that test/runtimes pins (Debian's
// does not know id-mapped mounts).
func runtimes(t *testing.T) map[string][]string {
	t.Helper()
	dir := t.TempDir()
	runc := testnode.Program{Name: "runc", Dir: "../runtimes", Package: "github.com/opencontainers/runc", Cgo: true}.Build(t)
	return map[string][]string{
		"runc": {runc, "--root", filepath.Join(dir, "runc-state")},
		// crun refuses the hybrid cgroups of some machines. This mount namespace has only the
		// unified hierarchy.
		"crun": {"unshare", "-m", "--propagation", "slave", "sh",
			"-c", `[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 none /sys/fs/cgroup; exec crun "$@"`, "crun",
			"--root", filepath.Join(dir, "crun-state"), "--cgroup-manager=disabled"},
	}
}

// container runs the program "inside" like a pod with its own user namespace: the volume is at
// /data, and the runtime id-maps it to that namespace.
func container(t *testing.T, runtime []string, name, volume string, host, uid, group uint32, args ...string) (string, error) {
	t.Helper()
	bundle := t.TempDir()
	rootfs := filepath.Join(bundle, "rootfs")
	for _, d := range []string{"proc", "dev", "data", "sys"} {
		ok(t, os.MkdirAll(filepath.Join(rootfs, d), 0o755))
	}
	run(t, "cp", insideProgram(t), rootfs+"/inside")
	// The container's root is not this machine's, and the umask may be 077.
	run(t, "chmod", "-R", "755", bundle)
	for dir := filepath.Dir(bundle); len(dir) >= len(os.TempDir()); dir = filepath.Dir(dir) {
		ok(t, os.Chmod(dir, 0o755))
	}
	mapping := []any{map[string]any{"containerID": 0, "hostID": host, "size": 65536}}
	mount := func(dest, kind, src string, options ...string) map[string]any {
		return map[string]any{"destination": dest, "type": kind, "source": src, "options": options}
	}
	spec := map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"user": map[string]any{"uid": uid, "gid": uid, "additionalGids": []uint32{group}},
			"args": append([]string{"/inside"}, args...), "cwd": "/", "noNewPrivileges": true,
		},
		"root": map[string]any{"path": "rootfs", "readonly": true},
		"mounts": []any{
			mount("/proc", "proc", "proc"), mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755"),
			mount("/data", "bind", volume, "bind", "idmap"),
		},
		"linux": map[string]any{
			"uidMappings": mapping, "gidMappings": mapping,
			"namespaces": []any{
				map[string]any{"type": "user"}, map[string]any{"type": "mount"}, map[string]any{"type": "pid"},
				map[string]any{"type": "ipc"}, map[string]any{"type": "uts"},
			},
		},
	}
	b, err := json.Marshal(spec)
	ok(t, err)
	ok(t, os.WriteFile(filepath.Join(bundle, "config.json"), b, 0o644))
	out, err := exec.Command(runtime[0],
		append(append([]string{}, runtime[1:]...), "run", "--bundle", bundle, "crust-"+name)...).CombinedOutput()
	if err != nil {
		// if it was created
		_ = exec.Command(runtime[0], append(append([]string{}, runtime[1:]...), "delete", "--force", "crust-"+name)...).Run()
		err = fmt.Errorf("%w: %s", err, out)
	}
	return string(out), err
}

// U02: containers have copies of all mounts for a while, so the test runs alone.
func TestU02_ContainersOfDifferentRangesShareAVolume(t *testing.T) {
	for name, runtime := range runtimes(t) {
		for _, fstype := range filesystems {
			t.Run(name+"/"+fstype, func(t *testing.T) {
				n := testnode.New(t, "")
				v := with(create(t, n, "v", csiclient.Volume{FSType: fstype}), "4242", "csi.crust.dev/hostUsers", "false")
				if mounter.SELinux().Answer == mounter.Yes {
					v.MountFlags = []string{"context=system_u:object_r:svirt_image_t:s0:c1,c2"}
				}
				target := n.Target("a")
				ok(t, n.Client.Stage(ctxOf(t), v))
				ok(t, n.Client.Publish(ctxOf(t), v, target, false))
				// As the container's root, then as a user with the pod's fsGroup.
				out, err := container(t, runtime, name+"1"+fstype, target, 100000, 0, 4242, "/data/root")
				ok(t, err)
				if !strings.Contains(out, "/data/root 0:4242") {
					t.Errorf("inside: %s", out)
				}
				out, err = container(t, runtime, name+"2"+fstype, target, 1700000, 1000, 4242, "/data/user", "/data/root")
				ok(t, err)
				if !strings.Contains(out, "/data/user 1000:4242") || !strings.Contains(out, "/data/root 0:4242") {
					t.Errorf("inside, with another range: %s", out)
				}
				// The ids on disk are the containers'.
				for file, want := range map[string]uint32{"root": 0, "user": 1000} {
					if uid, gid := owner(t, target+"/"+file); uid != want || gid != 4242 {
						t.Errorf("on disk %s is of %d:%d", file, uid, gid)
					}
				}
				if out, err := container(t, runtime, name+"3"+fstype, target, 100000, 2000, 4243, "/data/user"); err == nil {
					t.Errorf("a user without the group wrote: %s", out)
				}
				down(t, n, v.ID, target)
			})
		}
	}
}

// U03: the kernel maps a mount only once. A pod with a user namespace cannot start with an idmapped
// view. If the driver knows of the namespace, it uses chown. The test runs alone, like the one
// before.
func TestU03_RuntimesCannotMapAnIdmappedMountAgain(t *testing.T) {
	for name, runtime := range runtimes(t) {
		t.Run(name, func(t *testing.T) {
			n := testnode.New(t, "")
			v := with(create(t, n, "v", csiclient.Volume{FSType: "ext4"}), "", "fsGroupStrategy", "idmap")
			target := n.Target("a")
			ok(t, n.Client.Stage(ctxOf(t), v))
			ok(t, n.Client.Publish(ctxOf(t), with(v, "3000"), target, false))
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Publish(ctxOf(t), with(v, "4242"), target, false))
			if out, err := container(t, runtime, name+"no", target, 100000, 1000, 4242, "/data/file"); err == nil {
				t.Errorf("it started: %s", out)
			}
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
			ok(t, n.Client.Publish(ctxOf(t), with(v, "4242", "csi.crust.dev/hostUsers", "false"), target, false))
			out, err := container(t, runtime, name+"yes", target, 100000, 1000, 4242, "/data/file")
			ok(t, err)
			if !strings.Contains(out, "1000:4242") {
				t.Errorf("inside: %s", out)
			}
			down(t, n, v.ID, target)
		})
	}
}

func TestU01_TheStartTellsWhatCanBeMapped(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "", "--idmap-probe")
	for _, fstype := range filesystems {
		if !strings.Contains(n.Log(), "idmapped mounts of "+fstype+": yes") {
			t.Errorf("%s is not said to work", fstype)
		}
	}
}
