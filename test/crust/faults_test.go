package crust

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// C20: who may connect, and what a caller may name.
func TestC20_PeersAndDevices(t *testing.T) {
	s := newServer(t, "namespace", "", "--allow-device", "/dev/loop*")
	if st, err := os.Stat(s.Socket()); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket %v %v", st.Mode(), err)
	}
	// Another user: its credentials stop it even if the socket's mode does not.
	ok(t, os.Chmod(s.Socket(), 0o666))
	for dir := s.Node.Dir; len(dir) >= len(os.TempDir()); dir = filepath.Dir(dir) {
		ok(t, os.Chmod(dir, 0o755))
	}
	nobody := exec.Command(testnode.BuildCommand(t, "crustctl", ""), "--crust", "unix://"+s.Socket(), "sandbox", "list")
	bin := filepath.Join(s.Node.Dir, "crustctl")
	run(t, "cp", nobody.Path, bin)
	nobody.Path, nobody.Args[0] = bin, bin
	nobody.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := nobody.CombinedOutput(); err == nil {
		t.Errorf("another user was let in: %s", out)
	}
	for deadline := time.Now().Add(testcrust.Longest()); !strings.Contains(s.Log.String(), "user 65534"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("the log says nothing of the refused peer")
			break
		}
	}
	// A client does not talk to a server that is not root's.
	if c, err := crust.Dial("unix://"+s.Socket(), 65534); err == nil {
		_, err = c.ListSandboxes(ctxOf(t), &crustv1alpha1.ListSandboxesRequest{})
		if err == nil || !strings.Contains(err.Error(), "allowed are [65534]") {
			t.Errorf("a server of root for a client that wants another: %v", err)
		}
		c.Close()
	}

	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	s.namespace(p)
	source := p.info.Source
	disk := filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(disk, nil, 0o600))
	ok(t, os.Truncate(disk, 64<<20))
	run(t, "sh", "-c", "printf 'label: gpt\\n,,\\n' | sfdisk -q "+disk)
	parted := strings.TrimSpace(run(t, "losetup", "-P", "-f", "--show", disk))
	t.Cleanup(func() { run(t, "losetup", "-d", parted) })
	var st syscall.Stat_t
	ok(t, syscall.Stat(source, &st))
	alias := filepath.Join(t.TempDir(), "alias")
	ok(t, syscall.Mknod(alias, syscall.S_IFBLK|0o600, int(st.Rdev)))
	link := filepath.Join(t.TempDir(), "link")
	ok(t, os.Symlink(source, link))
	looksAllowed := fmt.Sprintf("/dev/loop-crust-test-%d", os.Getpid())
	ok(t, os.Symlink("/dev/vda", looksAllowed))
	t.Cleanup(func() { ok(t, os.Remove(looksAllowed)) })
	for _, device := range []string{
		"/dev/vda", link, alias, looksAllowed, parted + "p1", fmt.Sprintf("/dev/block/%d:%d", st.Rdev>>8, st.Rdev&0xff),
		"/dev/../dev/loop0", "/dev//loop0", "loop0", disk, "/dev/null",
		"/proc/self/fd/0", "/dev/loop0\x00",
	} {
		p.info.Source = device
		err := s.runtimePublish(p)
		if c := status.Code(err); c != codes.InvalidArgument && c != codes.FailedPrecondition {
			t.Errorf("%q: %v", device, err)
		}
	}
	p.info.Source = source
	target := p.target
	for _, path := range []string{"/etc", "/", "relative", s.Node.KubeletDir(), s.Node.KubeletDir() + "/../etc", target + "/",
		filepath.Join(t.TempDir(), "x")} {
		p.target = path
		refused(t, s.runtimePublish(p), codes.InvalidArgument)
	}
	// By a link inside.
	ok(t, os.Symlink(t.TempDir(), filepath.Join(s.Node.KubeletDir(), "out")))
	p.target = s.Node.KubeletDir() + "/out/mount"
	refused(t, s.runtimePublish(p), codes.InvalidArgument, "symbolic link")
	p.target = target
	ok(t, s.runtimePublish(p))
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
}

// The server refuses or answers each of ten thousand nonsense requests, and works as before
// afterwards.
func TestTenThousandRequestsOfNonsense(t *testing.T) {
	s := newServer(t, "namespace", "")
	r := rand.New(rand.NewPCG(1, 2))
	text := func() string {
		pieces := []string{"", "a", "..", "/", "/dev/loop0", s.Node.KubeletDir() + "/pods/x", "\x00", strings.Repeat("x", 5000), "ext4",
			"ro", "context=", "\xff\xfe", "-1", "sandbox"}
		out := ""
		for range r.IntN(3) {
			out += pieces[r.IntN(len(pieces))]
		}
		return strings.ToValidUTF8(out, "?")
	}
	ctx := ctxOf(t)
	for range 10000 {
		var err error
		switch r.IntN(8) {
		case 0:
			gid := r.Uint32()
			_, err = s.Client.RuntimePublishVolume(ctx, &crustv1alpha1.RuntimePublishVolumeRequest{
				SandboxId: text(), HostVolumeId: text(), HostTargetPath: text(), FileSystem: text(), MountOptions: []string{text(), text()},
				FsgroupGid: &gid, FsgroupPolicy: text(),
			})
		case 1:
			_, err = s.Client.RuntimeGetVolumeStats(ctx,
				&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: text(), HostVolumeId: text()})
		case 2:
			_, err = s.Client.RuntimeExpandVolume(ctx,
				&crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: text(), HostVolumeId: text(), RequiredBytes: r.Int64() - r.Int64()})
		case 3:
			_, err = s.Client.ResolveMount(ctx, &crustv1alpha1.ResolveMountRequest{SandboxId: text(), Source: text()})
		case 4:
			_, err = s.Client.RegisterSandbox(ctx,
				&crustv1alpha1.RegisterSandboxRequest{SandboxId: text(), Pid: r.Int64(), Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{
					Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: text(), ChannelSocket: text(), ChannelMagic: []byte(text())}}})
		case 5:
			_, err = s.Client.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: text(), HostVolumeId: text()})
		case 6:
			_, err = s.Client.RegisterSandbox(ctx, &crustv1alpha1.RegisterSandboxRequest{SandboxId: text(), Pid: -r.Int64N(1 << 40),
				Kind: &crustv1alpha1.RegisterSandboxRequest_Namespace{
					Namespace: &crustv1alpha1.NamespaceSandbox{UserNamespace: "/nowhere" + text()}}})
		case 7:
			_, err = s.Client.ExecInSandbox(ctx, &crustv1alpha1.ExecInSandboxRequest{SandboxId: text(), Argv: []string{text()}})
		}
		if c := status.Code(err); c == codes.Internal || c == codes.Unavailable || c == codes.Unknown || c == codes.DeadlineExceeded {
			t.Fatalf("%v", err)
		}
	}
	if strings.Contains(s.Log.String(), "panic") {
		t.Error("it panicked")
	}
	list, err := s.Client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	ok(t, err)
	if n := len(list.GetSandboxes()); n != 0 {
		t.Errorf("%d sandboxes were made", n)
	}
}

// A stopped machine answers nothing. Its callers get an answer in time, other sandboxes continue,
// and it works again when it resumes.
func TestAGuestThatNeverAnswers(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "", "--timeout", oneCall(t).String())
	s.acquaint()
	v := s.Volume("a", "ext4")
	p := s.pod("pod", v)
	ok(t, s.nodePublish(p))
	m := s.boot(p, "q35", "")
	for deadline := time.Now().Add(patience(t)); s.runtimePublish(p) != nil; time.Sleep(100 * time.Millisecond) { // it boots
		if time.Now().After(deadline) {
			t.Fatal("the guest does not come up")
		}
	}
	ok(t, syscall.Kill(m.vm.PID, syscall.SIGSTOP))
	begin := time.Now()
	_, err := s.Client.RuntimeGetVolumeStats(ctxOf(t),
		&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
	unanswered := func(err error) {
		t.Helper()
		if c := status.Code(err); c != codes.DeadlineExceeded && c != codes.Unavailable { // gRPC gives a connection up, too
			t.Errorf("a machine that is stopped: %v", err)
		}
	}
	unanswered(err)
	if took := time.Since(begin); took > 4*oneCall(t) {
		t.Errorf("answered after %s", took)
	}
	// Its lock is free again: the next call reaches the guest.
	_, err = s.Client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
	unanswered(err)
	ok(t, syscall.Kill(m.vm.PID, syscall.SIGCONT))
	for deadline := time.Now().Add(patience(t)); ; time.Sleep(100 * time.Millisecond) {
		if _, err = s.Client.UnpublishVolume(ctxOf(t), &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name,
			HostVolumeId: p.info.Source}); err == nil || time.Now().After(deadline) {
			break
		}
	}
	ok(t, err)
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(v)
}

// A process that pretends to be a guest and a QEMU, and lies.
func TestAGuestThatLies(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	address := l.Addr().String()
	ok(t, l.Close())
	s := newServer(t, "qemu", "", "--timeout", "3s", "--metrics-address", address)
	dir, err := os.MkdirTemp("", "lie")
	ok(t, err)
	t.Cleanup(func() { ok(t, os.RemoveAll(dir)) })
	serve := func(name string, f func(net.Conn)) string {
		path := filepath.Join(dir, name)
		l, err := net.Listen("unix", path)
		ok(t, err)
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { defer c.Close(); f(c) }()
			}
		}()
		return path
	}
	noise := func(c net.Conn) {
		b := make([]byte, 1<<16)
		for i := range b {
			b[i] = byte(rand.Uint32())
		}
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}
	// QEMU's end is honest up to the greeting.
	qmp := func(c net.Conn) {
		fmt.Fprintln(c, `{"QMP": {"version": {}, "capabilities": []}}`)
		buf := make([]byte, 4096)
		if _, err := c.Read(buf); err != nil {
			return
		}
		fmt.Fprintln(c, `{"return": {}, "id": 1}`)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
			fmt.Fprintln(c, `{"return": [{"name": "`+strings.Repeat("x", 100)+`"}], "id": 7}`) // answers no command
		}
	}
	echo := func(after func(net.Conn)) func(net.Conn) {
		return func(c net.Conn) {
			marker := make([]byte, 32)
			if n, err := c.Read(marker); err == nil && n == 32 {
				_, _ = c.Write(marker)
				after(c)
			}
		}
	}
	before := goroutines(t, address)
	for name, lie := range map[string]func(net.Conn){
		"noise instead of an echo": noise,
		"the wrong nonce": func(c net.Conn) {
			b := make([]byte, 32)
			_, _ = c.Read(b)
			b[20]++
			_, _ = c.Write(b)
			time.Sleep(time.Second)
		},
		"noise after the echo": echo(noise),
		"an oversized frame":   echo(func(c net.Conn) { _, _ = c.Write([]byte("\xff\xff\xff\x04\x00\x00\x00\x00\x00")); noise(c) }),
		"frames out of order": echo(func(c net.Conn) {
			_, _ = c.Write([]byte("\x00\x00\x05\x00\x01\x00\x00\x00\x63hello"))
			time.Sleep(time.Second)
		}),
		"nothing at all": func(c net.Conn) { time.Sleep(10 * time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			id := fmt.Sprint("liar-", len(name))
			_, err := s.Client.RegisterSandbox(ctxOf(t),
				&crustv1alpha1.RegisterSandboxRequest{SandboxId: id, Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{
					Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: serve("q"+id, qmp), ChannelSocket: serve("c"+id, lie)}}})
			ok(t, err)
			begin := time.Now()
			_, err = s.Client.ExecInSandbox(ctxOf(t), &crustv1alpha1.ExecInSandboxRequest{SandboxId: id, Argv: []string{"true"}})
			if err == nil || time.Since(begin) > testcrust.Longest() { // its caller waits for twice as long
				t.Errorf("%v after %s", err, time.Since(begin))
			}
			fs, err := s.Client.RuntimeGetSupportedFileSystems(ctxOf(t), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
			ok(t, err)
			if len(fs.GetFileSystems()) > 0 {
				t.Errorf("believed: %v", fs.GetFileSystems())
			}
			_, err = s.Client.DeregisterSandbox(ctxOf(t), &crustv1alpha1.DeregisterSandboxRequest{SandboxId: id})
			ok(t, err)
		})
	}
	// Nothing of them is still running.
	for deadline := time.Now().Add(testcrust.Longest()); ; time.Sleep(50 * time.Millisecond) {
		now := goroutines(t, address)
		if now <= before {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("%d goroutines, %d before", now, before)
			break
		}
	}
	if strings.Contains(s.Log.String(), "panic") {
		t.Error("it panicked")
	}
}

// goroutines counts those of a process that serves metrics.
func goroutines(t *testing.T, address string) int {
	t.Helper()
	r, err := http.Get("http://" + address + "/metrics")
	ok(t, err)
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	ok(t, err)
	m := regexp.MustCompile(`(?m)^go_goroutines (\d+)$`).FindStringSubmatch(string(b))
	if m == nil {
		t.Fatal("no go_goroutines")
	}
	n, err := strconv.Atoi(m[1])
	ok(t, err)
	http.DefaultClient.CloseIdleConnections()
	return n
}
