package mounter

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// allowed are the superblock options that may be asked for, by file system: a
// StorageClass, a claim's template or a sandbox's caller names them, and the
// node's kernel takes them as root. "key" is one without a value, "key=" one with
// any, "key=value" that one. Left out, among others:
//
//   - what lets a damaged file system end the node: errors=panic, fatal_errors=panic;
//   - what names another device or file: journal_dev, journal_path, logdev, rtdev,
//     device, usrjquota, grpjquota, sb, addr;
//   - what switches off a guard of the data: data=writeback (the old content of
//     blocks shows after a crash), nobarrier, noload, norecovery, rescue, degraded,
//     noblock_validity, nodatasum without nodatacow;
//   - what is for debugging.
var allowed = map[string][]string{
	"ext4": {
		"acl", "noacl", "auto_da_alloc", "noauto_da_alloc", "barrier", "barrier=1", "commit=", "data=ordered", "data=journal", "delalloc", "nodelalloc",
		"dioread_lock", "dioread_nolock", "discard", "nodiscard", "errors=continue", "errors=remount-ro", "grpid", "nogrpid", "i_version", "init_itable=",
		"noinit_itable", "inode_readahead_blks=", "journal_checksum", "lazytime", "nolazytime", "max_batch_time=", "min_batch_time=", "quota", "noquota",
		"usrquota", "grpquota", "prjquota", "stripe=", "user_xattr", "nouser_xattr",
	},
	"xfs": {
		"allocsize=", "attr2", "discard", "nodiscard", "filestreams", "ikeep", "noikeep", "inode32", "inode64", "largeio", "nolargeio", "lazytime", "nolazytime",
		"logbsize=", "logbufs=", "noalign", "nouuid", "quota", "noquota", "uquota", "usrquota", "uqnoenforce", "gquota", "grpquota", "gqnoenforce", "pquota",
		"prjquota", "pqnoenforce", "sunit=", "swidth=", "swalloc", "wsync",
	},
	"btrfs": {
		"acl", "noacl", "autodefrag", "noautodefrag", "barrier", "commit=", "compress", "compress=", "compress-force", "compress-force=", "datacow", "nodatacow",
		"datasum", "discard", "discard=sync", "discard=async", "nodiscard", "flushoncommit", "noflushoncommit", "lazytime", "nolazytime", "max_inline=",
		"space_cache", "space_cache=", "ssd", "nossd", "ssd_spread", "nossd_spread", "subvol=", "subvolid=", "thread_pool=", "user_subvol_rm_allowed",
	},
	"vfat": {
		"codepage=", "discard", "dmask=", "errors=continue", "errors=remount-ro", "flush", "fmask=", "gid=", "iocharset=", "quiet", "shortname=", "tz=UTC", "uid=",
		"umask=", "utf8", "utf8=",
	},
	"exfat": {"discard", "dmask=", "errors=continue", "errors=remount-ro", "fmask=", "gid=", "iocharset=", "uid=", "umask="},
	"ntfs3": {"discard", "dmask=", "fmask=", "gid=", "iocharset=", "nohidden", "prealloc", "showmeta", "uid=", "umask=", "windows_names"},
	"nfs": {
		"ac", "noac", "acdirmax=", "acdirmin=", "acregmax=", "acregmin=", "actimeo=", "acl", "noacl", "cto", "nocto", "fsc", "nofsc", "hard", "intr", "nointr",
		"local_lock=", "lock", "nolock", "lookupcache=", "max_connect=", "migration", "nomigration", "minorversion=", "mountport=", "mountproto=", "mountvers=",
		"nconnect=", "nfsvers=", "port=", "proto=", "rdirplus", "nordirplus", "rdma", "resvport", "noresvport", "retrans=", "retry=", "rsize=", "wsize=", "sec=",
		"sharecache", "nosharecache", "soft", "softerr", "softreval", "nosoftreval", "tcp", "timeo=", "trunkdiscovery", "notrunkdiscovery", "udp", "vers=", "xprtsec=",
	},
}

// alike are file systems that take another one's options.
var alike = map[string]string{"ext2": "ext4", "ext3": "ext4", "nfs4": "nfs", "ntfs": "ntfs3", "msdos": "vfat"}

// CheckOptions refuses superblock options that are not allowed for a file system
// of that type. With an empty type, which is found out later, it refuses what no
// file system may have.
func CheckOptions(fstype string, o Options) error {
	if other, ok := alike[fstype]; ok {
		fstype = other
	}
	for _, opt := range o.Superblock {
		if contextOptions[opt.Key] {
			continue
		}
		if fstype != "" {
			if !permits(allowed[fstype], opt) {
				return refuseOption(opt, fstype, allowed[fstype])
			}
			continue
		}
		some := false
		for _, list := range allowed {
			some = some || permits(list, opt)
		}
		if !some {
			return refuseOption(opt, "any file system", nil)
		}
	}
	return nil
}

func permits(list []string, o Option) bool {
	return slices.Contains(list, o.String()) || o.Value != "" && slices.Contains(list, o.Key+"=")
}

func refuseOption(o Option, fstype string, list []string) error {
	these := ""
	if len(list) > 0 {
		these = "; allowed are " + strings.Join(list, ", ") + ", and those of the mount itself (ro, noatime, nosuid, ...)"
	}
	return fault.New(fault.Invalid, "mount option %q is not allowed for %s%s (docs/parameters.md, \"Mount options\")", o, fstype, these)
}

// withoutPanic adds errors=remount-ro to the options of an ext2, ext3 or ext4 whose
// superblock asks for a panic, unless they have errors=: a volume's content must not end
// the node.
func withoutPanic(fs Filesystem) (Filesystem, error) {
	if alike[fs.Type] != "ext4" && fs.Type != "ext4" || slices.ContainsFunc(fs.Options.Superblock, func(o Option) bool { return o.Key == "errors" }) {
		return fs, nil
	}
	// Not the cached page: the kernel drops it when it mounts, and reads anew.
	f, err := linux.Open(fs.Device.Path, linux.ODirect)
	if err != nil {
		return fs, err
	}
	defer f.Close()
	const sError, panics = 1024 + 0x3c, 3 // s_errors, EXT4_ERRORS_PANIC
	var b [2]byte
	if _, err := (linux.Direct{File: f}).ReadAt(b[:], sError); err != nil {
		return fs, err
	}
	if binary.LittleEndian.Uint16(b[:]) == panics {
		fs.Options = fs.Options.With("errors", "remount-ro")
	}
	return fs, nil
}
