package podguest

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"

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
				// Nobody else has a pod's address, and until the kernel had looked for a second, nobody could use it.
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
	return nil
}

const (
	tcp         = 6  // the protocol's number
	tcpFlags    = 12 // where a TCP header has its length and flags, in bytes: two of them
	tcpChecksum = 16
	rst, ack    = 0x04, 0x10
)

// acceptResets sets the flag ACK of TCP resets that lack it. passt 2023-03-09, which Debian 12 has, sends such for a connection that is
// refused, and a client's kernel takes no other reset than one with ACK (RFC 9293, 3.10.7.3): connect(2) would wait for minutes.
func acceptResets() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "crust"})
	chain := c.AddChain(&nftables.Chain{Name: "resets", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{tcp}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags + 1, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{rst | ack}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{rst}},
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
