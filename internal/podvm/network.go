package podvm

import (
	"encoding/hex"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// findNetwork returns what this process's network namespace has besides the loopback device, nil if nothing. passt serves the interface
// with the default route; without such a route there is no network.
func findNetwork() (*guestv1.Network, error) {
	v4, err := os.ReadFile("/proc/self/net/route")
	if err != nil {
		return nil, err
	}
	v6, err := os.ReadFile("/proc/self/net/ipv6_route")
	if err != nil && !os.IsNotExist(err) { // a kernel without IPv6
		return nil, err
	}
	device, gateways := routes(string(v4), string(v6))
	if device == "" {
		return nil, nil
	}
	i, err := net.InterfaceByName(device)
	if err != nil {
		return nil, err
	}
	addrs, err := i.Addrs()
	if err != nil {
		return nil, err
	}
	n := &guestv1.Network{Mtu: uint32(i.MTU)}
	for _, a := range addrs {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil && !prefix.Addr().IsLinkLocalUnicast() {
			n.Addresses = append(n.Addresses, prefix.String())
		}
	}
	for _, g := range gateways {
		n.Gateways = append(n.Gateways, g.String())
	}
	return n, nil
}

// routes finds the device of the default route, and the gateways there, in the texts of /proc/net/route and /proc/net/ipv6_route.
func routes(v4, v6 string) (device string, gateways []netip.Addr) {
	const gatewayFlag = 2 // RTF_GATEWAY
	for line := range strings.Lines(v4) {
		f := strings.Fields(line) // Iface Destination Gateway Flags RefCnt Use Metric Mask
		if len(f) < 8 || f[1] != "00000000" || f[7] != "00000000" || device != "" && f[0] != device {
			continue
		}
		flags, _ := strconv.ParseUint(f[3], 16, 16)
		b, err := hex.DecodeString(f[2])
		if device = f[0]; err == nil && len(b) == 4 && flags&gatewayFlag != 0 {
			slices.Reverse(b) // it is in the order of this machine's bytes
			gateways = append(gateways, netip.AddrFrom4([4]byte(b)))
			break
		}
	}
	for line := range strings.Lines(v6) {
		f := strings.Fields(line) // destination, its prefix's length, source, its, next hop, metric, references, uses, flags, device
		if len(f) < 10 || strings.Trim(f[0], "0") != "" || f[1] != "00" || f[9] == "lo" || device != "" && f[9] != device {
			continue
		}
		flags, _ := strconv.ParseUint(f[8], 16, 32)
		b, err := hex.DecodeString(f[4])
		if device = f[9]; err == nil && len(b) == 16 && flags&gatewayFlag != 0 {
			gateways = append(gateways, netip.AddrFrom16([16]byte(b)))
			break
		}
	}
	return device, gateways
}
