package fstype

// The names that the detectors and the NFS code need. All other code uses the rows.
const (
	Ext2  = "ext2"
	Ext3  = "ext3"
	Ext4  = "ext4"
	XFS   = "xfs"
	Btrfs = "btrfs"
	F2FS  = "f2fs"
	VFAT  = "vfat"
	Exfat = "exfat"
	NTFS  = "ntfs3"
	NFS   = "nfs"
)

// table has the rows. The default comes first of those that can be made.
//
// Options lists what is permitted. A StorageClass, a claim's template or a sandbox's caller
// names superblock options, and the node's kernel applies them as root. "key" has no value,
// "key=" takes any value, "key=value" only that one. Excluded are, among others:
//
//   - options by which a damaged file system can crash the node: errors=panic,
//     fatal_errors=panic;
//   - options that name another device or file: journal_dev, journal_path, logdev, rtdev,
//     device, usrjquota, grpjquota, sb, addr;
//   - options that disable a protection of the data: data=writeback (the old content of blocks
//     shows after a crash), nobarrier, noload, norecovery, rescue, degraded, noblock_validity,
//     nodatasum without nodatacow;
//   - debugging options.
//
// Make leaves initialization to the kernel: a 1 TiB ext4 writes 16 MiB instead of 1,040. It
// does not discard, which only costs time on an empty device. It has no -F or -f: the programs
// refuse to overwrite existing content, and that is one more safeguard. Whole exists because
// lazy initialization could release the reserved space of a thick device.
var table = []Type{
	{
		Name: Ext2, Like: Ext4, Panic: extPanic, ErrorCount: extErrors, IdmapSince: "5.12", Grow: growExt, GrowthIsPrivileged: true,
		Check: []string{"e2fsck", "-p"}, CopyMetadata: []string{"e2image", "-r"}, Look: []string{"e2fsck", "-n"}, Package: "e2fsprogs",
		Resize: []string{"resize2fs"}, Fully: []string{"-f"},
	},
	{
		Name: Ext3, Like: Ext4, Panic: extPanic, ErrorCount: extErrors, IdmapSince: "5.12", Grow: growExt, GrowthIsPrivileged: true,
		Check: []string{"e2fsck", "-p"}, CopyMetadata: []string{"e2image", "-r"}, Look: []string{"e2fsck", "-n"}, Package: "e2fsprogs",
		Resize: []string{"resize2fs"}, Fully: []string{"-f"},
	},
	{
		Name: Ext4, Panic: extPanic, ErrorCount: extErrors, IdmapSince: "5.12", InodeTables: true, Grow: growExt, GrowthIsPrivileged: true,
		Head: 4 << 10, Minimum: 4 << 20, Force: "-F",
		Make:  []string{"mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"},
		Whole: []string{"-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"},
		Check: []string{"e2fsck", "-p"}, CopyMetadata: []string{"e2image", "-r"}, Look: []string{"e2fsck", "-n"},
		Resize: []string{"resize2fs"}, Fully: []string{"-f"},
		Package: "e2fsprogs",
		Options: []string{
			"acl", "noacl", "auto_da_alloc", "noauto_da_alloc", "barrier", "barrier=1", "commit=", "data=ordered", "data=journal",
			"delalloc", "nodelalloc", "dioread_lock", "dioread_nolock", "discard", "nodiscard", "errors=continue",
			"errors=remount-ro", "grpid", "nogrpid", "i_version", "init_itable=", "noinit_itable", "inode_readahead_blks=",
			"journal_checksum", "lazytime", "nolazytime", "max_batch_time=", "min_batch_time=", "quota", "noquota", "usrquota",
			"grpquota", "prjquota", "stripe=", "user_xattr", "nouser_xattr",
		},
	},
	{
		Name: XFS, Copy: "nouuid", IdmapSince: "5.12", Grow: growXFS,
		Head: 4 << 10, Minimum: 300 << 20, Force: "-f", Make: []string{"mkfs.xfs", "-q", "-K"},
		Check: []string{"xfs_repair", "-n"}, Look: []string{"xfs_repair", "-n"}, Package: "xfsprogs",
		Options: []string{
			"allocsize=", "attr2", "discard", "nodiscard", "filestreams", "ikeep", "noikeep", "inode32", "inode64", "largeio",
			"nolargeio", "lazytime", "nolazytime", "logbsize=", "logbufs=", "noalign", "nouuid", "quota", "noquota", "uquota",
			"usrquota", "uqnoenforce", "gquota", "grpquota", "gqnoenforce", "pquota", "prjquota", "pqnoenforce", "sunit=",
			"swidth=", "swalloc", "wsync",
		},
	},
	{
		Name: Btrfs, LabelByMount: true, Numberless: true, IdmapSince: "5.15", Grow: growBtrfs,
		Head: 68 << 10, Minimum: 114294784, Force: "-f",
		// The default sector size is this kernel's page size, and a kernel with smaller pages
		// cannot mount that.
		Make:  []string{"mkfs.btrfs", "-q", "-K", "-s", "4096"},
		Check: []string{"btrfs", "check", "--readonly"}, Look: []string{"btrfs", "check", "--readonly"}, NewID: []string{"btrfstune", "-m"},
		Package: "btrfs-progs",
		Options: []string{
			"acl", "noacl", "autodefrag", "noautodefrag", "barrier", "commit=", "compress", "compress=", "compress-force",
			"compress-force=", "datacow", "nodatacow", "datasum", "discard", "discard=sync", "discard=async", "nodiscard",
			"flushoncommit", "noflushoncommit", "lazytime", "nolazytime", "max_inline=", "space_cache", "space_cache=", "ssd",
			"nossd", "ssd_spread", "nossd_spread", "subvol=", "subvolid=", "thread_pool=", "user_subvol_rm_allowed",
		},
	},
	{
		// It has no growth: resize.f2fs 1.15 destroyed file systems that were 5 % full, and the kernel grows none.
		Name: F2FS, IdmapSince: "5.18",
		Head: 8 << 10, Minimum: 52 << 20, Force: "-f",
		// Only with its checksum does a damaged superblock show. It is off unless asked for.
		Make:  []string{"mkfs.f2fs", "-q", "-t", "0", "-O", "extra_attr,sb_checksum"},
		Check: []string{"fsck.f2fs", "--dry-run"}, Look: []string{"fsck.f2fs", "--dry-run"}, Package: "f2fs-tools",
		Options: []string{
			"acl", "noacl", "active_logs=", "alloc_mode=", "atgc", "background_gc=", "compress_algorithm=", "compress_cache",
			"compress_chksum", "compress_extension=", "compress_log_size=", "compress_mode=", "data_flush", "discard", "nodiscard",
			"discard_unit=", "errors=continue", "errors=remount-ro", "extent_cache", "noextent_cache", "flush_merge", "noflush_merge",
			"fsync_mode=posix", "fsync_mode=strict", "gc_merge", "nogc_merge", "inline_data", "noinline_data", "inline_dentry",
			"noinline_dentry", "inline_xattr", "noinline_xattr", "lazytime", "nolazytime", "memory=", "mode=adaptive", "mode=lfs",
			"nocompress_extension=", "quota", "noquota", "usrquota", "grpquota", "prjquota", "user_xattr", "nouser_xattr",
		},
	},
	{
		Name: VFAT, GroupByOption: true,
		Options: []string{
			"codepage=", "discard", "dmask=", "errors=continue", "errors=remount-ro", "flush", "fmask=", "gid=", "iocharset=",
			"quiet", "shortname=", "tz=UTC", "uid=", "umask=", "utf8", "utf8=",
		},
	},
	{
		Name: Exfat, GroupByOption: true,
		Options: []string{"discard", "dmask=", "errors=continue", "errors=remount-ro", "fmask=", "gid=", "iocharset=", "uid=", "umask="},
	},
	{
		Name: NTFS, GroupByOption: true,
		Options: []string{
			"discard", "dmask=", "fmask=", "gid=", "iocharset=", "nohidden", "prealloc", "showmeta",
			"uid=", "umask=", "windows_names",
		},
	},
	{Name: "ntfs", Driver: NTFS, Like: NTFS},
	{Name: "msdos", Driver: "msdos", Like: VFAT, GroupByOption: true},
	{
		Name: NFS, Share: true, Apart: "nosharecache",
		Options: []string{
			"ac", "noac", "acdirmax=", "acdirmin=", "acregmax=", "acregmin=", "actimeo=", "acl", "noacl", "cto", "nocto", "fsc",
			"nofsc", "hard", "intr", "nointr", "local_lock=", "lock", "nolock", "lookupcache=", "max_connect=", "migration",
			"nomigration", "minorversion=", "mountport=", "mountproto=", "mountvers=", "nconnect=", "nfsvers=", "port=", "proto=",
			"rdirplus", "nordirplus", "rdma", "resvport", "noresvport", "retrans=", "retry=", "rsize=", "wsize=", "sec=",
			"sharecache", "nosharecache", "soft", "softerr", "softreval", "nosoftreval", "tcp", "timeo=", "trunkdiscovery",
			"notrunkdiscovery", "udp", "vers=", "xprtsec=",
		},
	},
	{Name: "nfs4", Share: true, Like: NFS, Apart: "nosharecache"},
	{Name: "cifs", Share: true, Apart: "nosharesock"},
	{Name: "smb3", Share: true, Apart: "nosharesock"},
}

// Documentation/ABI/testing/sysfs-fs-ext4.
const extErrors = "/sys/fs/ext4/%s/errors_count"

// fs/ext4/ext4.h: s_errors, EXT4_ERRORS_PANIC, s_mount_opts.
var extPanic = &Panic{At: 1024 + 0x3c, Value: 3, Options: 1024 + 0x200, Unless: "errors", Calm: "remount-ro"}
