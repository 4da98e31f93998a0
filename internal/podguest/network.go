package podguest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// device is the guest's only network device.
const device = "eth0"

func connect(ctx context.Context, n *guestv1.Network) error {
	steps := [][]string{{"link", "set", "lo", "up"}}
	if n != nil {
		steps = append(steps, []string{"link", "set", device, "mtu", strconv.Itoa(int(n.GetMtu())), "up"})
		for _, a := range n.GetAddresses() {
			prefix, err := netip.ParsePrefix(a)
			if err != nil {
				return fault.New(fault.Invalid, "%w", err)
			}
			if prefix.Addr().Is6() {
				// The kernel would first look for a second whether somebody else has the address, and nobody could use it meanwhile.
				if err := linux.SetSysctl("net.ipv6.conf."+device+".accept_dad", "0"); err != nil {
					return err
				}
			}
			steps = append(steps, []string{"addr", "add", prefix.String(), "dev", device})
		}
		for _, g := range n.GetGateways() {
			gateway, err := netip.ParseAddr(g)
			if err != nil {
				return fault.New(fault.Invalid, "%w", err)
			}
			family := "-4"
			if gateway.Is6() {
				family = "-6"
			}
			// The gateway may lie outside of the address's network, as some network plugins have it.
			steps = append(steps, []string{family, "route", "add", gateway.WithZone("").String(), "dev", device},
				[]string{family, "route", "add", "default", "via", gateway.WithZone("").String(), "dev", device})
		}
	}
	for _, step := range steps {
		out, err := exec.CommandContext(ctx, busybox, append([]string{"ip"}, step...)...).CombinedOutput()
		if err != nil && !strings.Contains(string(out), "File exists") {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(step, " "), err, out)
		}
	}
	return usable(ctx)
}

// usable waits until the kernel lets the global IPv6 addresses be used, which takes a moment even without a look for their users.
func usable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		b, err := os.ReadFile("/proc/thread-self/net/if_inet6")
		if err != nil && !errors.Is(err, os.ErrNotExist) { // a kernel without IPv6
			return err
		}
		if !tentative(string(b)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the kernel does not let an address be used: %s", b)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// tentative reports whether the text of /proc/net/if_inet6 has a global address with IFA_F_TENTATIVE, rtnetlink(7).
func tentative(table string) bool {
	for line := range strings.Lines(table) {
		f := strings.Fields(line) // address, device's number, length, scope, flags, device
		if len(f) != 6 || f[3] != "00" {
			continue
		}
		if flags, err := strconv.ParseUint(f[4], 16, 32); err == nil && flags&0x40 != 0 {
			return true
		}
	}
	return false
}

const (
	tcp             = 6  // the protocol's number
	tcpFlags        = 12 // where a TCP header has its length and flags, in bytes: two of them
	tcpChecksum     = 16
	tcpAcknowledged = 8 // the acknowledgment number, of four bytes
	rst, ack        = 0x04, 0x10
)

// completeResets sets the flag ACK of TCP resets that lack it. Debian 12's passt (2023-03-09) sends such resets for connections that are
// refused. A client's kernel ignores them (RFC 9293, 3.10.7.3), so connect(2) would wait for minutes.
func completeResets() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "crust"})
	chain := c.AddChain(&nftables.Chain{Name: "resets", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
	from := make([]byte, 16) // IFNAMSIZ
	copy(from, device)
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: from},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{tcp}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags + 1, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{rst | ack}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{rst}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpAcknowledged, Len: 4},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)}, // it has a number
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags, Len: 2},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 2, Mask: binaryutil.BigEndian.PutUint16(0xffff),
			Xor: binaryutil.BigEndian.PutUint16(ack)},
		&expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags, Len: 2,
			CsumType: expr.CsumTypeInet, CsumOffset: tcpChecksum},
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}
