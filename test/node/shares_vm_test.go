//go:build vm

// Tests of shares, on kernels that have NFS and SMB: the guests of test/vm.

package node

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/external"
)

// exported returns the share of serveNFS as a volume.
func exported(id string, options ...string) csiclient.Volume {
	return csiclient.Volume{ID: id, Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, MountFlags: options,
		Context: map[string]string{"server": "127.0.0.1", "share": "/"}}
}

// A share outlives the network namespace of the driver's container: it is mounted in the host's.
func TestNFSUsesTheHostsNetwork(t *testing.T) {
	dir := serveNFS(t)
	n := testnode.NewStopped(t, "")
	n.Under = []string{"unshare", "-n"} // there not even 127.0.0.1 is up
	n.Begin()
	v := exported("share")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), v, n.Target("a"), false))
	n.Restart() // in another network namespace
	write(t, n.Target("a")+"/f", "there")
	if got := read(t, dir+"/f"); got != "there" {
		t.Errorf("the server has %q", got)
	}
	ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target("a")))
	ok(t, n.Client.Unstage(ctxOf(t), v.ID))
}

// The versions of nfs(5): the newest, any of 4, the requested one. A repeated publish with options
// is the same publish.
func TestNFSVersionsAndOptions(t *testing.T) {
	serveNFS(t)
	n := testnode.New(t, "")
	for i, c := range []struct{ options, shown string }{
		{"hard", "vers=4.2"}, {"nfsvers=4,noatime", "vers=4.2"}, {"vers=4.1,timeo=500", "vers=4.1"}, {"minorversion=1", "vers=4.1"},
		{"nolock", "vers=4.2"},
	} {
		v := exported(fmt.Sprint("v", i), c.options)
		target := n.Target(v.ID)
		ok(t, n.Client.Stage(ctxOf(t), v))
		for range 2 {
			ok(t, n.Client.Publish(ctxOf(t), v, target, false))
		}
		out := run(t, "grep", " "+target+" ", "/proc/self/mountinfo")
		for _, want := range append(strings.Split(c.options, ",")[1:], c.shown) {
			if !strings.Contains(out, want) {
				t.Errorf("with %s: no %s in %s", c.options, want, out)
			}
		}
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, target))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
	none := exported("none")
	none.Context["share"] = "/no/such"
	ok(t, n.Client.Stage(ctxOf(t), none))
	refused(t, n.Client.Publish(ctxOf(t), none, n.Target("none"), false), codes.FailedPrecondition, "127.0.0.1:/no/such",
		"exports nothing of that name")
	ok(t, n.Client.Unstage(ctxOf(t), none.ID))
}

func TestS07_TwoLabelsOnOneServer(t *testing.T) {
	n := testnode.New(t, "")
	dir := serveNFS(t)
	for _, name := range []string{"v1", "v2"} {
		ok(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	use := func(name, label string) (csiclient.Volume, string) {
		v := labelled(csiclient.Volume{ID: name, Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
			Context: map[string]string{"server": "127.0.0.1", "share": "/" + name}}, label)
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(name), false))
		return v, n.Target(name)
	}
	a, targetA := use("v1", labelA)
	b, targetB := use("v2", labelB)
	if got := label(t, targetA); got != labelA {
		t.Errorf("label %s", got)
	}
	if got := label(t, targetB); got != labelB {
		t.Errorf("label %s", got)
	}
	for v, target := range map[string]string{a.ID: targetA, b.ID: targetB} {
		ok(t, n.Client.Unpublish(ctxOf(t), v, target))
		ok(t, n.Client.Unstage(ctxOf(t), v))
	}
}

// S07: two labels on one SMB server. The driver has no such volumes, but pkg/mounter mounts them.
func TestS07_TwoLabelsOnOneSMBServer(t *testing.T) {
	dir := serveSMB(t)
	for name, want := range map[string]string{"v1": labelA, "v2": labelB} {
		ok(t, os.Mkdir(filepath.Join(dir, name), 0o777))
		o, err := mounter.ParseOptions([]string{"context=" + want, "username=root", "password=secret", "vers=3.1.1"})
		ok(t, err)
		m, err := external.Open(ctxOf(t), filepath.Join(t.TempDir(), "scratch"), "//127.0.0.1/share/"+name, "cifs", o, false)
		ok(t, err)
		defer m.Close()
		got, err := m.Label()
		ok(t, err)
		if got != want {
			t.Errorf("%s has the label %s", name, got)
		}
	}
}

// serveSMB exports a directory as "share" by the kernel's SMB server until the test ends. The user
// is root, the password "secret".
func serveSMB(t *testing.T) string {
	t.Helper()
	dir, conf := t.TempDir(), filepath.Join(t.TempDir(), "ksmbd.conf")
	ok(t, os.Chmod(dir, 0o777))
	ok(t, os.WriteFile(conf, []byte("[global]\n\tinterfaces = lo\n\tbind interfaces only = yes\n[share]\n\tpath = "+dir+
		"\n\tread only = no\n"), 0o644))
	run(t, "modprobe", "-a", "ksmbd", "cifs")
	users := filepath.Join(t.TempDir(), "users")
	run(t, "ksmbd.adduser", "-c", conf, "-i", users, "-a", "root", "-p", "secret")
	server := exec.Command("ksmbd.mountd", "-n", "-c", conf, "-u", users)
	server.Stdout, server.Stderr = os.Stderr, os.Stderr
	ok(t, server.Start())
	t.Cleanup(func() {
		run(t, "ksmbd.control", "-s")
		_ = server.Process.Kill()
		_ = server.Wait() // "signal: killed"
	})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		c, err := net.Dial("tcp", "127.0.0.1:445")
		if err == nil {
			c.Close()
			return dir
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// Of two volumes of one share, csi-node knows after a restart which pod has which.
func TestS07_ARestartTellsVolumesOfOneShareApart(t *testing.T) {
	serveNFS(t)
	n := testnode.New(t, "")
	all := []csiclient.Volume{exported("one"), exported("two")}
	for _, v := range all {
		ok(t, n.Client.Stage(ctxOf(t), v))
		ok(t, n.Client.Publish(ctxOf(t), v, n.Target(v.ID), false))
	}
	n.Restart()
	for _, v := range all {
		exits(t, n, 0, []string{"volume", "show", v.ID}, n.Target(v.ID))
		refused(t, n.Client.Unstage(ctxOf(t), v.ID), codes.FailedPrecondition, "still published at "+n.Target(v.ID))
		ok(t, n.Client.Unpublish(ctxOf(t), v.ID, n.Target(v.ID)))
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
}
