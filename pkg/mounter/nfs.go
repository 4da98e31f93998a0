package mounter

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// OpenNFS mounts an NFS share detached, without a program: the kernel speaks the
// protocol itself. source is "server:/path", with an IPv6 address in brackets. The
// options are those of nfs(5) that the kernel takes; retry=, which is mount.nfs's,
// is left out. Without vers= it is the newest version that both sides know, 4.2 to 3.
//
// An attempt lasts while the kernel tries to reach the server, by default some
// minutes. The context is looked at before each, not during it.
func OpenNFS(ctx context.Context, source string, o Options, readOnly bool) (*Detached, error) {
	if err := checkLabels(o); err != nil {
		return nil, err
	}
	server, err := serverOf(source)
	if err != nil {
		return nil, err
	}
	addresses, err := resolve(ctx, server, o.value("proto"))
	if err != nil {
		return nil, err
	}
	o = separate("nfs", o)
	var errs []error
	for _, address := range addresses {
		for _, version := range versions(o) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			d, err := openNFS(source, address, version, o, readOnly)
			if err == nil {
				return d, nil
			}
			errs = append(errs, err)
			// ECONNREFUSED: version 3 may be served at another port. EINVAL: a kernel that
			// does not know the version.
			if !errors.Is(err, linux.EPROTONOSUPPORT) && !errors.Is(err, linux.ECONNREFUSED) && !errors.Is(err, linux.EINVAL) {
				break
			}
		}
		if !unreachable(errs[len(errs)-1]) {
			break
		}
	}
	// The last attempt is the one that got furthest.
	return nil, errs[len(errs)-1]
}

// separate keeps a labelled share apart: else two volumes of one server would share a
// superblock, or a session, and its label.
func separate(fstype string, o Options) Options {
	if !o.labels() {
		return o
	}
	switch fstype {
	case "nfs", "nfs4":
		return o.With("nosharecache", "")
	case "cifs", "smb3":
		return o.With("nosharesock", "")
	}
	return o
}

func serverOf(source string) (string, error) {
	server, path, found := strings.Cut(source, ":/")
	if v6, ok := strings.CutPrefix(source, "["); ok {
		server, path, found = strings.Cut(v6, "]:/")
	}
	if !found || server == "" || strings.ContainsAny(server+path, "\x00\n") {
		return "", fault.New(fault.Invalid, "%q is not an NFS share; write server:/path, with an IPv6 address in brackets", source)
	}
	return server, nil
}

// resolve gives the addresses of a server that a protocol of nfs(5) can use.
func resolve(ctx context.Context, server, protocol string) ([]netip.Addr, error) {
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", server)
	if err != nil {
		return nil, fault.New(fault.State, "the NFS server %s cannot be resolved: %w", server, err)
	}
	var usable []netip.Addr
	for _, a := range all {
		if a = a.Unmap(); protocol == "" || strings.HasSuffix(protocol, "6") == a.Is6() {
			usable = append(usable, a)
		}
	}
	if len(usable) == 0 {
		return nil, fault.New(fault.State, "the NFS server %s has no address that proto=%s can use, only %v", server, protocol, all)
	}
	return usable, nil
}

// versions are those to try; one empty string if the options name one.
func versions(o Options) []string {
	for _, opt := range o.Superblock {
		switch opt.Key {
		case "vers", "nfsvers", "minorversion", "v3", "v4":
			return []string{""}
		}
	}
	return []string{"4.2", "4.1", "4", "3"}
}

func unreachable(err error) bool {
	for _, e := range []error{linux.ECONNREFUSED, linux.ETIMEDOUT, linux.EHOSTUNREACH, linux.ENETUNREACH, linux.EADDRNOTAVAIL} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func openNFS(source string, address netip.Addr, version string, o Options, readOnly bool) (*Detached, error) {
	o = o.With("addr", address.String())
	if version != "" {
		o = o.With("vers", version)
	}
	o.Superblock = slices.DeleteFunc(slices.Clone(o.Superblock), func(opt Option) bool { return opt.Key == "retry" })
	ctx, err := fsopen("nfs")
	if err != nil {
		return nil, fmt.Errorf("nfs from %s: %w", source, err)
	}
	defer ctx.Close()
	if err := linux.FsconfigString(ctx, "source", source); err != nil {
		return nil, fault.New(fault.Invalid, "nfs from %s: %w", source, err)
	}
	if err := configureOptions(ctx, "nfs", o); err != nil {
		return nil, err
	}
	if err := linux.FsconfigCreate(ctx); err != nil {
		said := ""
		if words := linux.FsContextLog(ctx); words != "" {
			said = ": the kernel says: " + words
		}
		return nil, fault.New(fault.State, "nfs from %s (%s%s): %w%s%s", source, address, versionWords(version), err, nfsMeans(err), said)
	}
	set, _ := o.attrs(readOnly)
	mount, err := linux.Fsmount(ctx, int(set))
	if err != nil {
		return nil, fmt.Errorf("nfs from %s: %w", source, err)
	}
	d := &Detached{mount: mount, isDir: true, what: "nfs from " + source}
	if err := verifyLabel(o, d.Label); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", d.what, err), d.Close())
	}
	return d, nil
}

func versionWords(version string) string {
	if version == "" {
		return ""
	}
	return ", version " + version
}

// nfsMeans is what an error of the kernel means here.
func nfsMeans(err error) string {
	switch {
	case errors.Is(err, linux.ENOENT):
		return " (the server exports nothing of that name)"
	case errors.Is(err, linux.EACCES), errors.Is(err, linux.EPERM):
		return " (the server refuses this node)"
	case errors.Is(err, linux.ECONNREFUSED):
		return " (nothing serves NFS there)"
	case errors.Is(err, linux.ETIMEDOUT), errors.Is(err, linux.EHOSTUNREACH), errors.Is(err, linux.ENETUNREACH):
		return " (the server does not answer)"
	case errors.Is(err, linux.EPROTONOSUPPORT):
		return " (the server or this kernel does not know that version of NFS)"
	}
	return ""
}
