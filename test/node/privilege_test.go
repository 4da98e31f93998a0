package node

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/privilege"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// capabilitiesOf returns a set of a process: CapEff, CapPrm, CapBnd.
func capabilitiesOf(t testing.TB, pid int, set string) uint64 {
	t.Helper()
	got, err := linux.CapabilitiesOf(fmt.Sprintf("/proc/%d/status", pid), set)
	ok(t, err)
	return got
}

// A09: csi-node holds only what it needs, and no program that it starts can have more. On
// Kubernetes a privileged container begins with everything.
func TestA09_TheDriverGivesBackWhatItDoesNotNeed(t *testing.T) {
	t.Parallel()
	var wanted uint64
	for _, need := range privilege.Storage {
		number, found := linux.CapabilityNumber(need.Name)
		if !found {
			t.Fatalf("%s is no capability", need.Name)
		}
		wanted |= 1 << number
	}
	wanted &= capabilitiesOf(t, os.Getpid(), "CapEff")
	n := testnode.New(t, "")
	for _, set := range []string{"CapEff", "CapPrm", "CapBnd"} {
		if got := capabilitiesOf(t, n.PID(), set); got != wanted {
			t.Errorf("%s is %#x, and %#x is needed", set, got, wanted)
		}
	}
	n.Kill()
	n.Args = []string{"--capabilities", privilege.All}
	n.Start()
	if got, have := capabilitiesOf(t, n.PID(), "CapEff"), capabilitiesOf(t, os.Getpid(), "CapEff"); got != have {
		t.Errorf("with all: %#x of %#x", got, have)
	}
	n.Kill()
	n.Args = []string{"--capabilities", "CHOWN,SYS_ALMIGHTY"}
	n.Launch()
	if err := n.Wait(); err == nil || !strings.Contains(n.Log(), `--capabilities: "SYS_ALMIGHTY" is no capability`) {
		t.Errorf("started: %v %s", err, n.Log())
	}
	n.Args = nil
	n.Start()
}

// A09: the doctor checks the driver's process, not its own, and says what does not work.
func TestA09_TheDoctorNamesAMissingCapability(t *testing.T) {
	t.Parallel()
	n := testnode.NewStopped(t, "",
		"--capabilities", "CHOWN,FOWNER,FSETID,SYS_ADMIN,SYS_CHROOT,SYS_PTRACE,SETUID,SETGID,SETFCAP,DAC_OVERRIDE,MKNOD")
	n.Begin()
	out, _ := crustctl(t, n, "doctor")
	if want := "driver's CAP_SYS_RESOURCE"; !strings.Contains(out, want) ||
		!strings.Contains(out, "without it, ext4 does not grow while it is mounted") {
		t.Errorf("no %q in\n%s", want, out)
	}
	n.Kill()
	n.Args = []string{"--capabilities", "CHOWN,SYS_ADMIN"}
	n.Start()
	out, well := crustctl(t, n, "doctor")
	if want := "driver's CAP_DAC_OVERRIDE"; well || !strings.Contains(out, want) ||
		!strings.Contains(out, "without it, files that belong to other users") {
		t.Errorf("%v: no %q in\n%s", well, want, out)
	}
}

// A09: without any one capability of the list, the log says what fails, and it fails. So none is
// unnecessary. Not beside other tests: its namespace would keep their mounts.
func TestA09_EachCapabilityIsMissed(t *testing.T) {
	// This machine's root may lack some. MKNOD is not needed, because /dev is complete.
	held := capabilitiesOf(t, os.Getpid(), "CapEff")
	untried := map[string]bool{"MKNOD": true}
	for _, need := range privilege.Storage {
		if number, _ := linux.CapabilityNumber(need.Name); held&(1<<number) == 0 {
			untried[need.Name] = true
		}
	}
	host := exec.Command("unshare", "-m", "--propagation", "private", "sleep", "3600")
	ok(t, host.Start())
	t.Cleanup(func() { _ = host.Process.Kill(); _ = host.Wait() })
	ns := fmt.Sprintf("/proc/%d/ns/mnt", host.Process.Pid)
	own, err := os.Readlink("/proc/self/ns/mnt")
	ok(t, err)
	for there := own; there == own; time.Sleep(time.Millisecond) { // unshare is still running
		there, err = os.Readlink(ns)
		ok(t, err)
	}
	all := strings.Split(privilege.Storage.List(), ",")
	if wrong := livesWith(t, ns, all); wrong != nil {
		t.Fatalf("with all of them: %v", wrong)
	}
	for i, need := range privilege.Storage {
		t.Run(need.Name, func(t *testing.T) {
			wrong := livesWith(t, ns, append(append([]string{}, all[:i]...), all[i+1:]...))
			if wrong == nil && !untried[need.Name] {
				t.Error("nothing fails without it: it is not needed")
			}
			t.Log(wrong)
		})
	}
}

// livesWith takes volumes through their lives with a driver that holds only these capabilities, and
// returns what does not work.
func livesWith(t *testing.T, ns string, held []string) error {
	n := testnode.NewStopped(t, "", "--host-mount-namespace", ns, "--capabilities", strings.Join(held, ","))
	n.Launch()
	wrong := served(t, n)
	for _, need := range privilege.Storage {
		if !slices.Contains(held, need.Name) {
			said(t, n, "CAP_"+need.Name+" is not held\" without=\""+need.Without)
		}
	}
	if wrong == nil {
		wrong = errors.Join(groups(t, n), sharedByIdmap(t, n), deferredTo(t, n))
	} else {
		wrong = fmt.Errorf("%w: %s", wrong, n.Log())
	}
	// With all capabilities the rest can be undone.
	n.Kill()
	n.Args = []string{"--host-mount-namespace", ns}
	n.Begin()
	r, err := n.Client.ListVolumes(ctxOf(t), &csi.ListVolumesRequest{})
	ok(t, err)
	for _, e := range r.GetEntries() {
		id := e.GetVolume().GetVolumeId()
		for _, pod := range []string{"groups", "one", "other", "deferred"} {
			_ = n.Client.Unpublish(ctxOf(t), id, n.Target(pod)) // only one volume is there
		}
		ok(t, n.Client.Unstage(ctxOf(t), id))
		ok(t, n.Client.Delete(ctxOf(t), id))
	}
	return wrong
}

// served waits until a launched node serves, or returns an error if it ends.
func served(t *testing.T, n *testnode.Node) error {
	t.Helper()
	var err error
	n.Client, err = csiclient.Dial(n.Endpoint(), n.KubeletDir())
	ok(t, err)
	ended := testnode.Ended(t, n.PID())
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		select {
		case <-ended:
			return fmt.Errorf("csi-node ended: %w", n.Wait())
		case <-time.After(2 * time.Millisecond):
		}
		if c, err := net.Dial("unix", strings.TrimPrefix(n.Endpoint(), "unix://")); err == nil {
			return c.Close()
		}
	}
	return errors.New("csi-node does not serve")
}

// groups gives a pod's files to a group.
func groups(t *testing.T, n *testnode.Node) error {
	v := csiclient.Volume{FSType: "ext4"}
	made, err := n.Client.Create(ctxOf(t), "groups", 64<<20, v, nil, nil)
	if err != nil {
		return err
	}
	v.ID = made.GetVolumeId()
	target := n.Target("groups")
	if err := errors.Join(n.Client.Stage(ctxOf(t), v), n.Client.Publish(ctxOf(t), v, target, false)); err != nil {
		return err
	}
	ok(t, os.MkdirAll(target+"/private/deep", 0o700))
	ok(t, os.WriteFile(target+"/private/deep/file", []byte("x"), 0o600))
	for _, path := range []string{"/private/deep/file", "/private/deep", "/private"} {
		ok(t, os.Chown(target+path, 1000, 1000))
	}
	err = errors.Join(n.Client.Unpublish(ctxOf(t), v.ID, target), n.Client.Publish(ctxOf(t), with(v, "4242"), target, false))
	if err != nil {
		return err
	}
	var st syscall.Stat_t
	ok(t, syscall.Stat(target+"/private/deep", &st))
	if st.Gid != 4242 || st.Mode&0o2070 != 0o2070 {
		return fmt.Errorf("a directory has group %d and mode %o", st.Gid, st.Mode)
	}
	if has, err := linux.HasCapability(linux.CapSysResource); err != nil || !has {
		return err // this machine's root cannot do that
	}
	_, err = n.Client.Expand(ctxOf(t), v.ID, 128<<20, target)
	return err
}

// sharedByIdmap shows one volume to two groups.
func sharedByIdmap(t *testing.T, n *testnode.Node) error {
	v := csiclient.Volume{FSType: "ext4", Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}
	made, err := n.Client.Create(ctxOf(t), "idmap", 64<<20, v, nil, nil)
	if err != nil {
		return err
	}
	v = with(v, "", "fsGroupStrategy", "idmap")
	v.ID = made.GetVolumeId()
	return errors.Join(n.Client.Stage(ctxOf(t), v), n.Client.Publish(ctxOf(t), with(v, "3000"), n.Target("one"), false),
		n.Client.Publish(ctxOf(t), with(v, "2000"), n.Target("other"), false))
}

// deferredTo leaves a volume to a pod's sandbox.
func deferredTo(t *testing.T, n *testnode.Node) error {
	v := csiclient.Volume{FSType: "ext4", Context: deferrable}
	made, err := n.Client.Create(ctxOf(t), "deferred", 64<<20, v, nil, nil)
	if err != nil {
		return err
	}
	v.ID = made.GetVolumeId()
	if err := n.Client.Stage(ctxOf(t), v); err != nil {
		return err
	}
	_, _, err = publishTo(t, n, v, n.Target("deferred"), false, "ext4")
	return err
}
