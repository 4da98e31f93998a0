package crust

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// configure sets a key of the runtime's configuration for later pods.
func (r *podRuntime) configure(t testing.TB, key string, value any) {
	t.Helper()
	file := filepath.Join(r.dir, "oci.json")
	b, err := os.ReadFile(file)
	ok(t, err)
	var config struct {
		Runtime string         `json:"runtime"`
		MicroVM map[string]any `json:"microvm"`
	}
	ok(t, json.Unmarshal(b, &config))
	config.MicroVM[key] = value
	b, err = json.Marshal(config)
	ok(t, err)
	ok(t, os.WriteFile(file, b, 0o600))
}

// resident returns the resident memory of a pod's monitor in bytes.
func (r *podRuntime) resident(t testing.TB, pod string) int64 {
	t.Helper()
	pid := strings.TrimSpace(run(t, "pgrep", "-f", "pod-monitor "+filepath.Join(r.pods, pod)+"$"))
	var kib int64
	_, err := fmt.Sscan(run(t, "awk", "$1 == \"VmRSS:\" {print $2}", "/proc/"+pid+"/status"), &kib)
	ok(t, err)
	return kib << 10
}

// manyCommands runs more commands in a container than may wait for its guest, which does not answer, and ends them.
func (r *podRuntime) manyCommands(t testing.TB, id string) {
	t.Helper()
	file := filepath.Join(r.dir, "process.json")
	ok(t, os.WriteFile(file, []byte(`{"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}}`), 0o600))
	ctx, end := context.WithCancel(t.Context())
	defer end()
	const calls, wait = 40, 32
	ended := make(chan struct{}, calls)
	for range calls {
		c := r.command(ctx, "exec", "--process", file, "--detach", id)
		ok(t, c.Start())
		go func() { _ = c.Wait(); ended <- struct{}{} }() // it is refused, or killed
	}
	limit := time.After(testcrust.Longest())
	for i := range calls - wait {
		select {
		case <-ended:
		case <-limit:
			t.Errorf("of %d commands, %d were refused", calls, i)
			return
		}
	}
	said, err := os.ReadFile(filepath.Join(r.dir, "log"))
	ok(t, err)
	if got := strings.Count(string(said), "32 commands wait for the guest already"); got != calls-wait {
		t.Errorf("%d refusals: %s", got, said)
	}
	end()
	for range wait {
		<-ended
	}
}

// flood sends datagrams from many clients as fast as it can, and takes no answer, until end is called.
func flood(t testing.TB, namespace, address string) (end func()) {
	t.Helper()
	ns, err := linux.Open(namespace, os.O_RDONLY)
	ok(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer ns.Close()
		for b := make([]byte, 60<<10); ctx.Err() == nil; time.Sleep(time.Millisecond) { // the guest needs a processor, too
			err := linux.InNetwork(ns, func() error {
				c, err := net.Dial("udp", address)
				if err != nil {
					return err
				}
				defer c.Close()
				for range 5 {
					_, _ = c.Write(b) // refused while the guest's port is not open
				}
				return nil
			})
			if err != nil {
				t.Error(err)
				return
			}
		}
	}()
	return func() { cancel(); <-ended }
}

// Root of a pod's microVM takes the place of the agent that runs the containers. Calls for the pod end, with bounded words, its monitor
// takes no more memory and ports than it may, another pod is served as before, and the pod can be ended.
func TestC20_C24_APodsGuestThatAttacks(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	honest, r := newPodRuntime(t, s), newPodRuntime(t, s)
	dir := t.TempDir()
	ok(t, os.Mkdir(dir+"/tree", 0o755))
	run(t, "cp", testnode.Program{Name: "hostile", Package: "./hostile"}.Build(t), dir+"/tree/hostile")
	run(t, "sh", "-c", fmt.Sprintf("cd %s/tree && find . | cpio --quiet -o -H newc > ../more && cat %s/pod-initramfs ../more > ../initramfs",
		dir, guestDir(t)))
	r.configure(t, "initrd", dir+"/initramfs")
	network, peer := networks(t)
	pause, other := r.pod(t, "evil", network), honest.pod(t, "good", "")
	sleeps := []string{"/bin/busybox", "sleep", "100000"}
	one, err := r.start(t, "one", r.spec(t, "evil", "container", sleeps...))
	ok(t, err)
	_, err = honest.start(t, "kept", honest.spec(t, "good", "container", sleeps...))
	ok(t, err)

	before := r.resident(t, "evil")
	evil := &machine{t: t, s: s, id: "evil"}
	becomes := func(mode string) {
		_, err := evil.Exec("echo " + mode + " >/mode")
		ok(t, err)
	}
	becomes("lies")
	_, err = evil.Exec("/hostile pod >/dev/console 2>&1 &")
	ok(t, err)
	one.wait(t) // nobody has its streams any more
	defer flood(t, peer, "10.99.0.2:5353")()
	eventually(t, testcrust.Longest(), "it attacks, and gets datagrams", func() bool {
		console, err := os.ReadFile(filepath.Join(r.pods, "evil", "console.log"))
		return err == nil && strings.Contains(string(console), "it has the pod's port") &&
			strings.Contains(string(console), "it has a datagram")
	})
	for _, mode := range []string{"lies", "huge", "noise", "silent"} {
		becomes(mode)
		plainly := func(what string, err error) {
			if err != nil {
				inPlainWords(t, mode+": "+what, err.Error())
			}
		}
		if mode == "lies" || mode == "huge" { // otherwise it takes the time that containerd gives it
			c, err := r.startWithin(t, mode, r.spec(t, "evil", "container", sleeps...), nil, 0)
			plainly("create", err)
			if err == nil {
				c.wait(t)
			}
			_, err = r.tryExec(t, "one", sleeps...)
			if mode == "huge" && err == nil {
				t.Error("a token of 16 MiB was taken")
			}
			plainly("exec", err)
			if c != nil {
				plainly("delete", r.call(nil, nil, nil, "delete", "--force", mode))
			}
		}
		if mode == "silent" {
			r.manyCommands(t, "one")
		}
		listening := run(t, "ip", "netns", "exec", filepath.Base(network), "sh", "-c",
			"cat /proc/net/tcp /proc/net/tcp6 | grep -c ' 0A '; cat /proc/net/udp /proc/net/udp6 | grep -c ': '; true")
		var tcp, udp int
		_, err := fmt.Sscan(listening, &tcp, &udp)
		ok(t, err)
		if tcp > 2*256 || udp > 2*256+8 { // on both loopback addresses; passt has some
			t.Errorf("%s: the monitor listens on %d ports, and %d of UDP", mode, tcp, udp)
		}
		after := r.resident(t, "evil")
		t.Logf("%s: the monitor had %d MiB, and has %d", mode, before>>20, after>>20)
		if after > before+40<<20 { // it grows by 20 MiB, and by 16 for each copy of one of hostile's messages
			t.Errorf("%s: that is too much", mode)
		}
		log, err := os.ReadFile(filepath.Join(r.pods, "evil", "monitor.log"))
		ok(t, err)
		inPlainWords(t, mode+": monitor.log", string(log))
		if out, status := honest.exec(t, "kept", "/bin/busybox", "echo", "served"); status != 0 || out != "served\n" {
			t.Errorf("%s: the other pod: %d %q", mode, status, out)
		}
	}
	ok(t, r.call(nil, nil, nil, "delete", "--force", "one"))
	r.end(t, pause) // its agent answers nothing
	honest.end(t, other)
}
