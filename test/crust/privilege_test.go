package crust

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/privilege"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// A09: crustd's list of capabilities is exact. Without any one of them something fails; with all of
// them everything works.
func TestA09_EachCapabilityOfCrustdIsMissed(t *testing.T) {
	held, err := linux.CapabilitiesOf("/proc/self/status", "CapEff")
	ok(t, err)
	if wrong := sandboxLife(t, privilege.Sandboxes); wrong != nil {
		t.Fatalf("with all of them: %v", wrong)
	}
	for i, need := range privilege.Sandboxes {
		t.Run(need.Name, func(t *testing.T) {
			// This machine's root may lack some. MKNOD is needed only if a device's path now names
			// another device.
			number, _ := linux.CapabilityNumber(need.Name)
			untried := held&(1<<number) == 0 || need.Name == "MKNOD"
			wrong := sandboxLife(t, slices.Delete(slices.Clone(privilege.Sandboxes), i, i+1))
			if wrong == nil && !untried {
				t.Error("nothing fails without it: it is not needed")
			}
			t.Log(wrong)
		})
	}
}

// begins starts a crustd. It fails if crustd ends instead of serving.
func begins(t *testing.T, s *server) error {
	t.Helper()
	s.Launch()
	ended := testnode.Ended(t, s.Cmd.Process.Pid)
	for deadline := time.Now().Add(testcrust.Longest()); time.Now().Before(deadline); {
		select {
		case <-ended:
			err := fmt.Errorf("crustd ended: %w: %s", s.Cmd.Wait(), s.Log.String())
			s.Cmd = nil
			return err
		case <-time.After(10 * time.Millisecond):
		}
		if c, err := net.Dial("unix", s.Socket()); err == nil {
			c.Close()
			s.Client, err = crust.Dial("unix://" + s.Socket())
			return err
		}
	}
	return errors.New("crustd does not serve")
}

// sandboxLife publishes a volume to the sandbox of a pod with a user namespace and a group, with a
// crustd that holds only these capabilities. It returns what does not work.
func sandboxLife(t *testing.T, held privilege.Needs) error {
	t.Helper()
	host := exec.Command("sleep", "3600") // as the node's PID 1: it holds everything
	ok(t, host.Start())
	t.Cleanup(func() { _ = host.Process.Kill(); _ = host.Wait() })
	for _, program := range []string{"crust-oci", "crustctl"} { // crustd installs them on its host
		testnode.BuildCommand(t, program, "")
	}
	n := testnode.New(t, "")
	s := &server{Server: &testcrust.Server{T: t, Node: n, Backend: "namespace", Bin: testnode.BuildCommand(t, "crustd", ""), Args: []string{
		"--capabilities", held.List(), "--host-mount-namespace", fmt.Sprintf("/proc/%d/ns/mnt", host.Process.Pid),
		"--install-dir", filepath.Join(n.Dir, "installed"),
	}}}
	t.Cleanup(s.CleanUp)
	if err := begins(t, s); err != nil {
		s.Args = nil // for the cleanup
		return err
	}
	v := s.Volume("a", "ext4")
	at := n.Target("host")
	ok(t, n.Client.Publish(ctxOf(t), v, at, false))
	ok(t, os.MkdirAll(at+"/private/deep", 0o700))
	ok(t, os.WriteFile(at+"/private/deep/file", nil, 0o600))
	for _, path := range []string{"/private/deep/file", "/private/deep", "/private"} {
		ok(t, os.Chown(at+path, 1000, 1000))
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, at))

	p := s.pod("pod", v)
	group := uint32(3000)
	p.group = &group
	ok(t, s.nodePublish(p))
	holder := exec.Command("sleep", "3600")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	holder.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{},
	}
	ok(t, holder.Start())
	defer func() { _ = holder.Process.Kill(); _ = holder.Wait() }()

	wrong := func() error {
		_, err := s.Client.RegisterSandbox(ctxOf(t), &crustv1alpha1.RegisterSandboxRequest{
			SandboxId: p.name, Kind: &crustv1alpha1.RegisterSandboxRequest_Namespace{Namespace: &crustv1alpha1.NamespaceSandbox{
				UserNamespace: fmt.Sprintf("/proc/%d/ns/user", holder.Process.Pid),
			}},
		})
		if err != nil {
			return err
		}
		if err := s.runtimePublish(p); err != nil {
			return err
		}
		sb := &testcrust.Holder{T: t, S: s.Server, ID: p.name, Cmd: holder}
		out, err := sb.Exec("stat -c '%g %a' " + p.target + "/private/deep")
		if err == nil && strings.TrimSpace(out) != "103000 2770" {
			err = fmt.Errorf("a directory has group and mode %s", out)
		}
		return err
	}()
	// A crustd with all capabilities undoes what is left.
	s.Stop()
	s.Args = nil
	s.Start()
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
	return wrong
}
