package crust

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

var madeNetworks atomic.Int32

// networks makes two connected network namespaces: a pod's, which has 10.99.0.2, fd99::2 and default routes, and that of its peer,
// 10.99.0.1 and fd99::1.
func networks(t testing.TB) (pod, peer string) {
	t.Helper()
	n := madeNetworks.Add(1)
	names := []string{fmt.Sprintf("crust-pod-%d-%d", os.Getpid(), n), fmt.Sprintf("crust-peer-%d-%d", os.Getpid(), n)}
	for _, n := range names {
		run(t, "ip", "netns", "add", n)
		t.Cleanup(func() { run(t, "ip", "netns", "delete", n) })
		run(t, "ip", "-n", n, "link", "set", "lo", "up")
	}
	run(t, "ip", "-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
	for i, n := range names {
		run(t, "ip", "-n", n, "addr", "add", fmt.Sprintf("10.99.0.%d/24", 2-i), "dev", "eth0")
		run(t, "ip", "-n", n, "link", "set", "eth0", "up")
		if haveIPv6() {
			run(t, "ip", "-n", n, "addr", "add", fmt.Sprintf("fd99::%d/64", 2-i), "dev", "eth0", "nodad")
		}
	}
	run(t, "ip", "-n", names[0], "route", "add", "default", "via", "10.99.0.1")
	if haveIPv6() {
		run(t, "ip", "-n", names[0], "route", "add", "default", "via", "fd99::1")
	}
	return filepath.Join("/run/netns", names[0]), filepath.Join("/run/netns", names[1])
}

// haveIPv6 reports whether this machine's kernel has IPv6.
func haveIPv6() bool {
	_, err := os.Stat("/proc/net/if_inet6")
	return err == nil
}

// in runs f in a network namespace.
func in(t testing.TB, namespace string, f func() error) {
	t.Helper()
	ns, err := linux.Open(namespace, os.O_RDONLY)
	ok(t, err)
	defer ns.Close()
	ok(t, linux.InNetwork(ns, f))
}

// datagram sends one from a network namespace, and waits a second for its answer.
func datagram(t testing.TB, namespace, address string) error {
	t.Helper()
	var c net.Conn
	in(t, namespace, func() (err error) { c, err = net.Dial("udp", address); return err })
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Second)) // it has a socket
	if _, err := io.WriteString(c, "hello"); err != nil {
		return err
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err == nil && string(b[:n]) != "hello!" {
		err = fmt.Errorf("the answer is %q", b[:n])
	}
	return err
}

// drain reads all that has come, and then one datagram more.
func drain(t testing.TB, c net.PacketConn) {
	t.Helper()
	b := make([]byte, 100)
	for {
		ok(t, c.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
		if _, _, err := c.ReadFrom(b); err != nil {
			break
		}
	}
	ok(t, c.SetReadDeadline(time.Now().Add(testcrust.Longest())))
	n, from, err := c.ReadFrom(b)
	if err != nil || string(b[:n]) != "of the server's own" || from.String() != "10.99.0.2:5300" {
		t.Errorf("from %v came %q: %v", from, b[:n], err)
	}
}

// A pod in a microVM has its own address: it reaches others, and others reach what its containers listen on, and nothing else. It ends
// with its microVM.
func TestC19_C24_APodsNetworkAndItsEnd(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	podNetwork, peerNetwork := networks(t)
	pause := r.pod(t, "pod-n", podNetwork)
	var l net.Listener
	in(t, peerNetwork, func() (err error) { l, err = net.Listen("tcp", ":8000"); return err })
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			_, _ = bufio.NewReader(c).ReadString('\n')
			_, _ = fmt.Fprintf(c, "HTTP/1.0 200 OK\r\n\r\nhello %s\n", host)
			c.Close()
		}
	}()
	six, five := "", "" // what the container does with IPv6
	if haveIPv6() {
		six, five = "busybox wget -qO- 'http://[fd99::1]:8000/';", "'[fd99::2]:5303'"
	}
	c, err := r.start(t, "web", r.spec(t, "pod-n", "container", "/bin/busybox", "sh", "-c",
		`busybox wget -qO- http://10.99.0.1:8000/; `+six+` busybox nc -w 60 10.99.0.1 9 2>&1; mkdir /tmp/w; echo page > /tmp/w/f; cd /tmp/w; busybox nc -l -p 9000 -s 127.0.0.1 &
		/echo 10.99.0.1:5400 :5300 127.0.0.1:5301 10.99.0.2:5302 `+five+` & exec busybox httpd -f -p 8080`).add(
		mount("/echo", "bind", testnode.Program{Name: "echo", Package: "./echo"}.Build(t), "bind", "ro")))
	ok(t, err)
	eventually(t, testcrust.Longest(), "the container reaches its peer, which sees the pod's address", func() bool {
		return strings.Contains(c.text(t), "hello 10.99.0.2\n") && (!haveIPv6() || strings.Contains(c.text(t), "hello fd99::2\n"))
	})
	eventually(t, testcrust.Longest(), "a connection that is refused does not hang", func() bool {
		return strings.Contains(c.text(t), "Connection refused")
	})
	get := func(namespace, address string) (answer string, err error) {
		in(t, namespace, func() error {
			var to net.Conn
			if to, err = net.DialTimeout("tcp", address, testcrust.Longest()); err != nil {
				return nil
			}
			defer to.Close()
			if _, err = io.WriteString(to, "GET /f HTTP/1.0\r\n\r\n"); err == nil {
				var b []byte
				b, err = io.ReadAll(to)
				answer = string(b)
			}
			return nil
		})
		return answer, err
	}
	type way struct{ namespace, address string }
	tcp := []way{
		{peerNetwork, "10.99.0.2:8080"}, // another pod, a probe of the kubelet's
		{podNetwork, "127.0.0.1:8080"},  // kubectl port-forward
	}
	udp := []way{{peerNetwork, "10.99.0.2:5300"}, {podNetwork, "127.0.0.1:5301"}, {peerNetwork, "10.99.0.2:5302"}}
	if haveIPv6() {
		tcp = append(tcp, way{peerNetwork, "[fd99::2]:8080"})
		udp = append(udp, way{peerNetwork, "[fd99::2]:5300"}, way{peerNetwork, "[fd99::2]:5303"})
	}
	for _, from := range tcp {
		answer := ""
		eventually(t, testcrust.Longest(), "a server in the guest is reached at "+from.address, func() bool {
			answer, err = get(from.namespace, from.address)
			return err == nil
		})
		if !strings.HasSuffix(answer, "page\n") {
			t.Errorf("%s answers %q", from.address, answer)
		}
	}
	if _, err := get(peerNetwork, "10.99.0.2:9000"); err == nil {
		t.Error("what listens for the pod only is reached by others")
	}
	if _, err := get(peerNetwork, "10.99.0.2:8081"); err == nil {
		t.Error("a port where nobody listens is reached")
	}
	var own net.PacketConn
	in(t, peerNetwork, func() (err error) { own, err = net.ListenPacket("udp", "10.99.0.1:5400"); return err })
	defer own.Close()
	for _, from := range udp {
		eventually(t, testcrust.Longest(), "a server in the guest gets datagrams to "+from.address, func() bool {
			return datagram(t, from.namespace, from.address) == nil
		})
	}
	if err := datagram(t, peerNetwork, "10.99.0.2:5301"); !errors.Is(err, linux.ECONNREFUSED) {
		t.Errorf("a datagram to what listens for the pod only: %v", err)
	}

	// What a server sends by itself, from the port on which the monitor listens by now, arrives. Clients reach the server all the same.
	for range 3 {
		drain(t, own)
		if err := datagram(t, peerNetwork, "10.99.0.2:5300"); err != nil {
			t.Error(err)
		}
	}

	// Each program of the microVM runs as a user of the pod's, or sees nothing but the pod's directory.
	var vm struct{ QEMU int }
	readJSON(t, filepath.Join(r.pods, "pod-n", "guest.json"), &vm)
	var pod struct{ Monitor struct{ PID int } }
	readJSON(t, filepath.Join(r.pods, "pod-n", "pod.json"), &pod)
	for _, program := range []string{"qemu-system-x86", "passt"} {
		out, err := exec.Command("pgrep", "-P", fmt.Sprint(pod.Monitor.PID), "-u", "1900000000", program).Output()
		if err != nil || len(out) == 0 {
			t.Errorf("%s does not run as the pod's user: %v", program, err)
		}
	}

	// QEMU ends: so do the container and the pod's own one, and nothing waits.
	qemu, err := os.FindProcess(vm.QEMU)
	ok(t, err)
	ok(t, qemu.Kill())
	begin := time.Now()
	if status := c.wait(t); status != 137 {
		t.Errorf("the container ended with %d", status)
	}
	if status := pause.wait(t); status != 137 {
		t.Errorf("the pod's own container ended with %d", status)
	}
	t.Logf("after %s", time.Since(begin))
	if _, err := r.start(t, "late", r.spec(t, "pod-n", "container", "/bin/busybox", "true")); err == nil ||
		!strings.Contains(err.Error(), "the microVM of pod pod-n has ended") {
		t.Errorf("a container of a pod whose microVM has ended: %v", err)
	}
	r.delete(t, "web")
	r.end(t, pause)
	b, err := os.ReadFile(filepath.Join(r.pods, ".ended", "pod-n.log"))
	if err != nil || !strings.Contains(string(b), "QEMU has ended: signal: killed") {
		t.Errorf("why the pod ended: %v %s", err, b)
	}
}

func readJSON(t testing.TB, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	ok(t, err)
	ok(t, json.Unmarshal(b, into))
}
