package mounter

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// NFS describes which share to mount, and how.
type NFS struct {
	// Source is "server:/path", at most 255 bytes. An IPv6 address is in brackets.
	Source string
	// Options are the options of nfs(5) that the kernel handles. retry= belongs to mount.nfs
	// and is dropped. Without a version, the mount uses the newest one that both sides support,
	// from 4.2 to 4.0.
	Options  Options
	ReadOnly bool
	// Network is the network namespace of the mount for its lifetime; nil: that of this
	// process.
	Network *os.File
}

// OpenNFS mounts an NFS share detached. It starts no program, because the kernel implements the
// protocol. It uses version 3, whose locks need rpc.statd on the node, only if the options ask
// for it, or if locks stay on the node (nolock, local_lock=all).
//
// An attempt lasts as long as the kernel tries to reach the server, by default some minutes.
// The context is checked before each attempt, not during it.
func OpenNFS(ctx context.Context, n NFS) (*Detached, error) {
	if err := CheckLabels(n.Options); err != nil {
		return nil, err
	}
	server, err := serverOf(n.Source)
	if err != nil {
		return nil, err
	}
	addresses, err := resolve(ctx, server, n.Options.value("proto"))
	if err != nil {
		return nil, err
	}
	n.Options = separate(fstype.NFS, n.Options)
	var first error
	for _, address := range addresses {
		d, err := n.at(ctx, address)
		if err == nil {
			return d, nil
		}
		if first == nil {
			first = err
		}
		if !unreachable(err) {
			break
		}
	}
	return nil, first
}

// at tries one address of the server with each candidate version. It returns the error of the
// first attempt, unless that is only about the version.
func (n NFS) at(ctx context.Context, address netip.Addr) (*Detached, error) {
	var told error
	for _, v := range versions(n.Options) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		d, err := n.open(address, v)
		if err == nil {
			return d, nil
		}
		if told == nil || isVersion(told) && !isVersion(err) {
			told = err
		}
		if !mayHelp(err) {
			break
		}
	}
	if isVersion(told) && !locksStay(n.Options) {
		told = fmt.Errorf("%w. For NFS 3 give vers=3, which needs rpc.statd on the node for locks, or nolock", told)
	}
	return nil, told
}

// isVersion reports whether the server or the kernel does not support the version. A kernel
// without it returns EINVAL.
func isVersion(err error) bool {
	return errors.Is(err, linux.EPROTONOSUPPORT) || errors.Is(err, linux.EINVAL)
}

// mayHelp reports whether an older version might succeed. Version 3 uses another port and other
// paths.
func mayHelp(err error) bool {
	return isVersion(err) || errors.Is(err, linux.ECONNREFUSED) || errors.Is(err, linux.ENOENT) || errors.Is(err, linux.EPERM)
}

// separate adds the option that keeps a labelled share separate. Otherwise two volumes of one
// server would share a superblock or a session, and with it the label.
func separate(share string, o Options) Options {
	if apart := fstype.Of(share).Apart; apart != "" && o.Labels() {
		return o.With(apart, "")
	}
	return o
}

func serverOf(source string) (string, error) {
	server, path, found := strings.Cut(source, ":/")
	if v6, ok := strings.CutPrefix(source, "["); ok {
		server, path, found = strings.Cut(v6, "]:/")
	}
	const most = 255 // fsconfig(2)
	if len(source) > most {
		return "", fault.New(fault.Invalid, "the NFS share %q has more than %d bytes, which the kernel does not take", source, most)
	}
	if !found || server == "" || strings.ContainsAny(server+path, "\x00\n") {
		return "", fault.New(fault.Invalid, "%q is not an NFS share; write server:/path, with an IPv6 address in brackets", source)
	}
	return server, nil
}

// resolve returns the addresses of a server that a proto= of nfs(5) can use.
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

// locksStay reports whether locks are local to the node.
func locksStay(o Options) bool {
	for _, opt := range o.Superblock {
		if opt.Key == "nolock" || opt.Key == "local_lock" && opt.Value == "all" {
			return true
		}
	}
	return false
}

// versions lists the versions to try, each as the options that request it.
func versions(o Options) [][]Option {
	vers := func(list ...string) (all [][]Option) {
		for _, v := range list {
			all = append(all, []Option{{"vers", v}})
		}
		return all
	}
	minor := false
	for _, opt := range o.Superblock {
		switch {
		case strings.HasPrefix(opt.Key, "mount"): // mountport and similar options exist only in version 3
			return vers("3")
		case opt.Key == "minorversion":
			minor = true
		}
	}
	asked := o.value("vers") + o.value("nfsvers")
	switch {
	case asked == "4" && !minor: // any 4.x, as nfs(5) defines it
		return vers("4.2", "4.1", "4.0")
	case asked != "":
		return [][]Option{nil}
	case minor:
		return vers("4")
	case locksStay(o):
		return vers("4.2", "4.1", "4.0", "3")
	}
	return vers("4.2", "4.1", "4.0")
}

func unreachable(err error) bool {
	for _, e := range []error{
		linux.ECONNREFUSED, linux.ETIMEDOUT, linux.EHOSTUNREACH, linux.ENETUNREACH, linux.EADDRNOTAVAIL, linux.EACCES,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (n NFS) open(address netip.Addr, version []Option) (*Detached, error) {
	o := n.Options
	o.Superblock = slices.DeleteFunc(slices.Clone(o.Superblock), func(opt Option) bool {
		return opt.Key == "retry" || len(version) > 0 && (opt.Key == "vers" || opt.Key == "nfsvers")
	})
	for _, opt := range version {
		o = o.With(opt.Key, opt.Value)
	}
	o = o.With("addr", address.String())
	what := fmt.Sprintf("nfs from %s (%s%s)", n.Source, address, versionWords(version))
	var ctx *os.File
	// The mount uses the network namespace in which fsopen ran.
	err := linux.InNetwork(n.Network, func() (err error) { ctx, err = fsopen(fstype.NFS); return err })
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	defer ctx.Close()
	if err := linux.FsconfigString(ctx, "source", n.Source); err != nil {
		return nil, fault.New(fault.Invalid, "%s: %w", what, err)
	}
	if err := configureOptions(ctx, fstype.NFS, o); err != nil {
		return nil, err
	}
	if err := linux.FsconfigCreate(ctx); err != nil {
		said := ""
		if words := linux.FsContextLog(ctx); words != "" {
			said = ": the kernel says: " + words
		}
		return nil, fault.New(fault.State, "%s: %w%s%s", what, err, nfsMeans(err), said)
	}
	set, _ := o.attrs(n.ReadOnly)
	mount, err := linux.Fsmount(ctx, int(set))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	d := &Detached{mount: mount, isDir: true, what: "nfs from " + n.Source}
	if err := verifyLabel(o, d.Label); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", d.what, err), d.Close())
	}
	return d, nil
}

func versionWords(version []Option) string {
	if len(version) == 0 {
		return ""
	}
	return ", version " + version[0].Value
}

// nfsMeans explains an error of the kernel.
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
