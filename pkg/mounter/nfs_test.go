package mounter

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

func TestServerOf(t *testing.T) {
	for source, want := range map[string]string{
		"server:/a/b": "server", "10.0.0.1:/": "10.0.0.1", "[fe80::1%eth0]:/a": "fe80::1%eth0", "[::1]:/a:/b": "::1", "s:/a:/b": "s",
		"": "", "server": "", "server:a": "", ":/a": "", "[]:/a": "", "[::1]/a": "", "s:/a\nb": "",
		"s:/" + strings.Repeat("x", 252): "s", "s:/" + strings.Repeat("x", 253): "",
	} {
		got, err := serverOf(source)
		if got != want || (err == nil) != (want != "") || err != nil && !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %q, %v", source, got, err)
		}
	}
}

func FuzzServerOf(f *testing.F) {
	f.Add("server:/share")
	f.Add("[::1]:/share")
	f.Fuzz(func(t *testing.T, source string) {
		server, err := serverOf(source)
		if err == nil && (server == "" || !strings.HasPrefix(source, server+":/") && !strings.HasPrefix(source, "["+server+"]:/")) {
			t.Errorf("%q: %q", source, server)
		}
	})
}

func TestAddressesThatAProtocolCanUse(t *testing.T) {
	for _, c := range []struct{ server, protocol, want string }{
		{"127.0.0.1", "", "127.0.0.1"}, {"127.0.0.1", "tcp", "127.0.0.1"}, {"::1", "tcp6", "::1"}, {"::1", "", "::1"},
		{"127.0.0.1", "tcp6", ""}, {"::1", "tcp", ""}, {"no.such.host.invalid", "", ""},
	} {
		got, err := resolve(t.Context(), c.server, c.protocol)
		if (err == nil) != (c.want != "") || err == nil && !slices.Contains(got, netip.MustParseAddr(c.want)) {
			t.Errorf("%s with proto=%q: %v, %v", c.server, c.protocol, got, err)
		}
		if err != nil && (!fault.Is(err, fault.State) || !strings.Contains(err.Error(), c.server)) {
			t.Errorf("%s: %v", c.server, err)
		}
	}
}

func TestVersionsOfNFS(t *testing.T) {
	for options, want := range map[string]string{
		"hard": "4.2 4.1 4.0", "nolock": "4.2 4.1 4.0 3", "local_lock=all": "4.2 4.1 4.0 3", "local_lock=flock": "4.2 4.1 4.0",
		"vers=3": "", "nfsvers=4.1": "", "vers=4": "4.2 4.1 4.0", "nfsvers=4": "4.2 4.1 4.0", "vers=4,minorversion=1": "",
		"minorversion=1": "4", "mountport=20048": "3",
	} {
		o, err := ParseOptions([]string{options})
		check(t, err)
		var got []string
		for _, v := range versions(o) {
			for _, opt := range v {
				got = append(got, opt.Value)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q: %q", options, got)
		}
	}
}

// S07
func TestS07_LabelledSharesAreKeptApart(t *testing.T) {
	label, err := ParseOptions([]string{"context=system_u:object_r:svirt_image_t:s0"})
	check(t, err)
	for fstype, want := range map[string]string{
		"nfs": "nosharecache", "nfs4": "nosharecache", "cifs": "nosharesock", "smb3": "nosharesock", "ext4": "",
	} {
		got := separate(fstype, label).Superblock
		if len(got) != len(label.Superblock)+min(len(want), 1) || want != "" && !slices.Contains(got, Option{Key: want}) {
			t.Errorf("%s: %v", fstype, got)
		}
		if got := separate(fstype, Options{}).Superblock; len(got) > 0 {
			t.Errorf("%s without a label: %v", fstype, got)
		}
	}
}

// A kernel without NFS, and one with NFS but no server, give clear errors.
func TestAnNFSShareThatIsNotThere(t *testing.T) {
	_, err := OpenNFS(t.Context(), NFS{Source: "127.0.0.1:/none"})
	if !fault.Is(err, fault.State) || !strings.Contains(err.Error(), "127.0.0.1:/none") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := OpenNFS(ctx, NFS{Source: "127.0.0.1:/none"}); err == nil {
		t.Error("it was mounted for a caller that is gone")
	}
}
