// Package scrub makes copies of the driver's records and of the kernel's mount information that can
// be shared with strangers: everything not known to be harmless is left out.
package scrub

import (
	"encoding/json"
	"errors"
	"regexp"
	"strings"
)

// LeftOut replaces what was left out.
const LeftOut = "(left out)"

// user matches the credentials in an address. A password may contain / and @.
var user = regexp.MustCompile(`//[^\s"']*@`)

// Text removes names and passwords from addresses.
func Text(s string) string { return user.ReplaceAllString(s, "//"+LeftOut+"@") }

// options lists the mount options that contain no secret, by name.
var options = words(`
	ro rw nosuid suid nodev dev noexec exec noatime atime relatime norelatime nodiratime diratime strictatime lazytime nolazytime sync async dirsync
	nosymfollow mand nomand silent loud remount bind defaults idmapped
	seclabel context fscontext defcontext rootcontext
	acl noacl user_xattr nouser_xattr barrier nobarrier data errors commit journal_checksum journal_async_commit delalloc nodelalloc discard nodiscard
	stripe resgid resuid init_itable noinit_itable block_validity noblock_validity dioread_lock dioread_nolock max_batch_time min_batch_time prjquota
	usrquota grpquota quota noquota uquota gquota pquota uqnoenforce gqnoenforce pqnoenforce noload auto_da_alloc noauto_da_alloc nombcache
	attr2 noattr2 inode32 inode64 ikeep noikeep largeio nolargeio logbufs logbsize logdev rtdev nouuid norecovery swalloc sunit swidth wsync filestreams allocsize
	autodefrag noautodefrag clear_cache compress compress-force datacow nodatacow datasum nodatasum degraded device enospc_debug flushoncommit noflushoncommit
	max_inline metadata_ratio space_cache nospace_cache ssd ssd_spread nossd nossd_spread subvol subvolid thread_pool treelog notreelog rescue skip_balance
	vers nfsvers minorversion proto port mountport mountproto mountvers mountaddr addr clientaddr sec rsize wsize bsize namlen hard soft softerr softreval
	timeo retrans retry acregmin acregmax acdirmin acdirmax actimeo ac noac cto nocto lookupcache local_lock lock nolock intr nointr
	resvport noresvport sharecache nosharecache nconnect max_connect rdirplus nordirplus migration nomigration fsc nofsc trunkdiscovery xprtsec`)

// Options removes mount options that are not known to be harmless: file systems with a login have
// passwords there.
func Options(s string) string {
	if s == "" {
		return s
	}
	parts := strings.Split(s, ",")
	for i, p := range parts {
		if name, _, _ := strings.Cut(p, "="); !options[name] {
			parts[i] = LeftOut
		}
	}
	return Text(strings.Join(parts, ","))
}

var device = regexp.MustCompile(`^\d+:\d+$`)

// MountLine removes from a line of mountinfo the options that Options removes; it removes an
// invalid line.
func MountLine(line string) string {
	before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
	// The kernel escapes only this space in names.
	head, tail := strings.Split(before, " "), strings.Split(after, " ")
	if !ok || len(head) < 6 || !device.MatchString(head[2]) || !strings.HasPrefix(head[4], "/") || len(tail) < 2 {
		return LeftOut
	}
	head[5] = Options(head[5])
	tail[1] = source(tail[1])
	if len(tail) > 2 {
		tail[2] = Options(strings.Join(tail[2:], " "))
		tail = tail[:3]
	}
	return Text(strings.Join(head, " ") + " - " + strings.Join(tail, " "))
}

// source removes credentials, which are not only in addresses with // (FUSE).
func source(s string) string {
	before, _, _ := strings.Cut(s, "@")
	at := strings.LastIndex(s, "@")
	if at < 0 {
		return s
	}
	start := 0
	if i := strings.Index(before, "//"); i >= 0 {
		start = i + len("//")
	}
	return s[:start] + LeftOut + s[at:]
}

// flags lists csi-node's flags. Their values are no secrets; a test of csi-node checks that the
// list is complete.
var flags = words(`endpoint endpoint-group capabilities node-id driver-name pool allow-device state-dir kubelet-dir fsgroup-policy expansion idmap-probe
	runtime-assisted-mounts host-mount-namespace kubelet-registration-dir metrics-address log-format v version
	config node-labels check-config`)

// KnowsFlag reports whether Args shows a flag of csi-node.
func KnowsFlag(name string) bool { return flags[name] }

// Args removes from csi-node's command line everything that belongs to none of its flags.
func Args(args []string) []string {
	out := []string{}
	wanted := false // the next argument is the value of a known flag
	for i, a := range args {
		name, dashed := strings.CutPrefix(a, "-")
		name = strings.TrimPrefix(name, "-")
		name, _, hasValue := strings.Cut(name, "=")
		switch {
		case i == 0, dashed && flags[name], wanted && !dashed:
			out = append(out, Text(a))
		default:
			out = append(out, LeftOut)
		}
		wanted = i > 0 && dashed && flags[name] && !hasValue
	}
	return out
}

// keys lists the keys of records whose values are kept. Everything below another key is left out.
var keys = words(`kind version data state volume snapshot id name sizeBytes created thick block fsType share sourceSnapshot sourceVolume parameters facts
	formatting formatted givenRaw givenToGuest growDue identityDue type volumeID bootID stagingPath accessMode device superblockOptions hostMayMount
	Path Major Minor ReadOnly path major minor target source options shown readOnly group dir server format identity value startBytes lengthBytes rawAs read
	witness doneBytes volumes pool provisioning allowRuntimeAssistedMount hostMayMount fsGroupStrategy fsGroupChangePolicy recursiveReadOnly
	csi.storage.k8s.io/fstype csi.storage.k8s.io/pvc/name csi.storage.k8s.io/pvc/namespace csi.storage.k8s.io/pv/name`)

// listed contains the keys whose values are mount options.
var listed = words("superblockOptions options")

var kind = regexp.MustCompile(`^crust-csi\.[a-z-]+$`)

// Record removes a record's unknown fields, and the mount options that Options removes. Anything
// that is not a record of this project is an error.
func Record(b []byte) ([]byte, error) {
	var e struct {
		Kind    string         `json:"kind"`
		Version int            `json:"version"`
		Data    map[string]any `json:"data"`
	}
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, errors.New("not a record") // the error quotes the text
	}
	if !kind.MatchString(e.Kind) {
		return nil, errors.New("not a record of csi-node")
	}
	value("", e.Data)
	out, err := json.MarshalIndent(e, "", "  ")
	return append(out, '\n'), err
}

func value(key string, v any) any {
	switch v := v.(type) {
	case string:
		if listed[key] {
			return Options(v)
		}
		return Text(v)
	case []any:
		for i := range v {
			v[i] = value(key, v[i])
		}
	case map[string]any:
		for k := range v {
			switch {
			case listed[key] && options[k], !listed[key] && keys[k]:
				v[k] = value(k, v[k])
			case listed[key]:
				delete(v, k)
				v[LeftOut] = ""
			default:
				v[k] = LeftOut
			}
		}
	}
	return v
}

func words(s string) map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(s) {
		m[w] = true
	}
	return m
}
