package podguest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// haveIPv6 reports whether this machine's kernel has IPv6.
func haveIPv6() bool {
	_, err := os.Stat("/proc/net/if_inet6")
	return err == nil
}

// namespaces makes two connected network namespaces: a guest's, whose device has no address yet, and that of its peer, 10.99.0.1. The peer
// has the guest's IPv6 address, too: a kernel that looked for that would not let the guest use it.
func namespaces(t *testing.T) (guest, peer *os.File) {
	t.Helper()
	ip := func(argv ...string) {
		t.Helper()
		if out, err := exec.Command("ip", argv...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", strings.Join(argv, " "), err, out)
		}
	}
	names := []string{fmt.Sprintf("crust-guest-%d", os.Getpid()), fmt.Sprintf("crust-other-%d", os.Getpid())}
	var files [2]*os.File
	for i, name := range names {
		ip("netns", "add", name)
		t.Cleanup(func() { ip("netns", "delete", name) })
		var err error
		if files[i], err = linux.Open("/run/netns/"+name, os.O_RDONLY); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { files[i].Close() })
	}
	ip("-n", names[0], "link", "add", device, "type", "veth", "peer", "name", device, "netns", names[1])
	ip("-n", names[1], "addr", "add", "10.99.0.1/24", "dev", device)
	ip("-n", names[1], "link", "set", device, "up")
	if haveIPv6() {
		ip("-n", names[1], "addr", "add", "fd99::2/64", "dev", device, "nodad")
	}
	return files[0], files[1]
}

// C19: a guest takes the addresses of its pod, of both families, and can use them at once. (The guest's ip is busybox's.)
func TestC19_AGuestHasThePodsAddresses(t *testing.T) {
	n := &guestv1.Network{Addresses: []string{"10.99.0.2/24"}, Gateways: []string{"10.99.0.1"}, Mtu: 1400}
	listen := []string{"10.99.0.2:0"}
	if haveIPv6() {
		n.Addresses, n.Gateways = append(n.Addresses, "fd99::2/64"), append(n.Gateways, "fe80::1")
		listen = append(listen, "[fd99::2]:0")
	}
	guest, _ := namespaces(t)
	err := linux.InNetwork(guest, func() error {
		if err := connect(t.Context(), n); err != nil {
			return err
		}
		for _, address := range listen {
			l, err := net.Listen("tcp", address) // refused if the kernel looks for who else has the address
			if err != nil {
				return err
			}
			l.Close()
		}
		return connect(t.Context(), n) // as in a repeated call
	})
	if err != nil {
		t.Error(err)
	}
}

// C19: a connection that is refused ends, though the reset has no ACK, as passt's.
func TestC19_ARefusedConnectionEnds(t *testing.T) {
	guest, peer := namespaces(t)
	err := linux.InNetwork(peer, clearACK)
	if errors.Is(err, linux.EOPNOTSUPP) || errors.Is(err, linux.EPROTONOSUPPORT) {
		t.Logf("this machine has no nftables (%v): TestC19_C24_APodsNetworkAndItsEnd tries it in a guest, with passt", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	var refused error
	err = linux.InNetwork(guest, func() error {
		if err := connect(t.Context(), &guestv1.Network{Addresses: []string{"10.99.0.2/24"}, Mtu: 1400}); err != nil {
			return err
		}
		if _, err := net.DialTimeout("tcp", "10.99.0.1:9", 5*time.Second); !os.IsTimeout(err) {
			return fmt.Errorf("the peer's resets are ordinary ones: %w", err)
		}
		if err := completeResets(); err != nil {
			return err
		}
		_, refused = net.DialTimeout("tcp", "10.99.0.1:9", time.Minute)
		return nil
	})
	if err != nil || !errors.Is(refused, linux.ECONNREFUSED) {
		t.Error(refused, err)
	}
}

// clearACK clears that flag of the resets that leave a network namespace.
func clearACK() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "test"})
	chain := c.AddChain(&nftables.Chain{Name: "out", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRaw})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{tcp}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags, Len: 2},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 2, Mask: []byte{0xff, 0xff &^ ack}, Xor: []byte{0, 0}},
		&expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags, Len: 2,
			CsumType: expr.CsumTypeInet, CsumOffset: tcpChecksum},
	}})
	return c.Flush()
}

// C19: an address that the kernel still examines is told from others.
func TestC19_ATentativeAddress(t *testing.T) {
	const loopback = "00000000000000000000000000000001 01 80 10 80       lo\n"
	const local = "fe800000000000000000000000000001 02 40 20 80     eth0\n"
	const global = "fd990000000000000000000000000002 02 40 00 80     eth0\n"
	for text, want := range map[string]bool{
		"": false, loopback + local + global: false, local[:39] + "20 c0     eth0\n": false,
		loopback + global[:39] + "00 c0     eth0\n": true,
	} {
		if got := tentative(text); got != want {
			t.Errorf("%v of %q", got, text)
		}
	}
}
