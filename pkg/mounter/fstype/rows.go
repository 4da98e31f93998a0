package fstype

// The names that a detector, or what mounts NFS, has to say. All others ask a row.
const (
	Ext2  = "ext2"
	Ext3  = "ext3"
	Ext4  = "ext4"
	XFS   = "xfs"
	Btrfs = "btrfs"
	VFAT  = "vfat"
	Exfat = "exfat"
	NTFS  = "ntfs3"
	NFS   = "nfs"
)

// table has the rows, the default first of those that can be made.
//
// Options is a list of what may be asked for: a StorageClass, a claim's template or a
// sandbox's caller names superblock options, and the node's kernel takes them as root.
// "key" is one without a value, "key=" one with any, "key=value" that one. Left out,
// among others:
//
//   - what lets a damaged file system end the node: errors=panic, fatal_errors=panic;
//   - what names another device or file: journal_dev, journal_path, logdev, rtdev,
//     device, usrjquota, grpjquota, sb, addr;
//   - what switches off a guard of the data: data=writeback (the old content of
//     blocks shows after a crash), nobarrier, noload, norecovery, rescue, degraded,
//     noblock_validity, nodatasum without nodatacow;
//   - what is for debugging.
//
// Make leaves initialisation to the kernel: a 1 TiB ext4 costs 16 MiB of writing instead
// of 1,040; and to discard a device that holds nothing costs time only. It has no -F or
// -f: the programs' own refusal to overwrite something is one more fence. A lazy
// initialisation on a device whose space is reserved could give the space back: Whole.
var table = []Type{
	{
		Name: Ext2, Like: Ext4, Panic: extPanic, IdmapSince: "5.12", Grow: growExt, GrowthIsPrivileged: true,
		Check: []string{"e2fsck", "-p"}, Preen: true, Look: []string{"e2fsck", "-n"}, Resize: []string{"resize2fs"}, Package: "e2fsprogs",
	},
	{
		Name: Ext3, Like: Ext4, Panic: extPanic, IdmapSince: "5.12", Grow: growExt, GrowthIsPrivileged: true,
		Check: []string{"e2fsck", "-p"}, Preen: true, Look: []string{"e2fsck", "-n"}, Resize: []string{"resize2fs"}, Package: "e2fsprogs",
	},
	{
		Name: Ext4, Panic: extPanic, IdmapSince: "5.12", InodeTables: true, Grow: growExt, GrowthIsPrivileged: true,
		Head: 4 << 10, Minimum: 4 << 20, Force: "-F",
		Make:  []string{"mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"},
		Whole: []string{"-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"},
		Check: []string{"e2fsck", "-p"}, Preen: true, Look: []string{"e2fsck", "-n"}, Resize: []string{"resize2fs"},
		Package: "e2fsprogs", Others: []string{"e2image"},
		Options: []string{
			"acl", "noacl", "auto_da_alloc", "noauto_da_alloc", "barrier", "barrier=1", "commit=", "data=ordered", "data=journal", "delalloc", "nodelalloc",
			"dioread_lock", "dioread_nolock", "discard", "nodiscard", "errors=continue", "errors=remount-ro", "grpid", "nogrpid", "i_version", "init_itable=",
			"noinit_itable", "inode_readahead_blks=", "journal_checksum", "lazytime", "nolazytime", "max_batch_time=", "min_batch_time=", "quota", "noquota",
			"usrquota", "grpquota", "prjquota", "stripe=", "user_xattr", "nouser_xattr",
		},
	},
	{
		Name: XFS, Copy: "nouuid", IdmapSince: "5.12", Grow: growXFS,
		Head: 4 << 10, Minimum: 300 << 20, Force: "-f", Make: []string{"mkfs.xfs", "-q", "-K"},
		Check: []string{"xfs_repair", "-n"}, Look: []string{"xfs_repair", "-n"}, Package: "xfsprogs",
		Options: []string{
			"allocsize=", "attr2", "discard", "nodiscard", "filestreams", "ikeep", "noikeep", "inode32", "inode64", "largeio", "nolargeio", "lazytime", "nolazytime",
			"logbsize=", "logbufs=", "noalign", "nouuid", "quota", "noquota", "uquota", "usrquota", "uqnoenforce", "gquota", "grpquota", "gqnoenforce", "pquota",
			"prjquota", "pqnoenforce", "sunit=", "swidth=", "swalloc", "wsync",
		},
	},
	{
		Name: Btrfs, LabelByMount: true, Numberless: true, IdmapSince: "5.15", Grow: growBtrfs,
		Head: 68 << 10, Minimum: 114294784, Force: "-f",
		// The default sector is this kernel's page, and a kernel of smaller pages does not mount that.
		Make:  []string{"mkfs.btrfs", "-q", "-K", "-s", "4096"},
		Check: []string{"btrfs", "check", "--readonly"}, Look: []string{"btrfs", "check", "--readonly"}, NewID: []string{"btrfstune", "-m"},
		Package: "btrfs-progs",
		Options: []string{
			"acl", "noacl", "autodefrag", "noautodefrag", "barrier", "commit=", "compress", "compress=", "compress-force", "compress-force=", "datacow", "nodatacow",
			"datasum", "discard", "discard=sync", "discard=async", "nodiscard", "flushoncommit", "noflushoncommit", "lazytime", "nolazytime", "max_inline=",
			"space_cache", "space_cache=", "ssd", "nossd", "ssd_spread", "nossd_spread", "subvol=", "subvolid=", "thread_pool=", "user_subvol_rm_allowed",
		},
	},
	{
		Name: VFAT, GroupByOption: true,
		Options: []string{
			"codepage=", "discard", "dmask=", "errors=continue", "errors=remount-ro", "flush", "fmask=", "gid=", "iocharset=", "quiet", "shortname=", "tz=UTC", "uid=",
			"umask=", "utf8", "utf8=",
		},
	},
	{
		Name: Exfat, GroupByOption: true,
		Options: []string{"discard", "dmask=", "errors=continue", "errors=remount-ro", "fmask=", "gid=", "iocharset=", "uid=", "umask="},
	},
	{
		Name: NTFS, GroupByOption: true,
		Options: []string{"discard", "dmask=", "fmask=", "gid=", "iocharset=", "nohidden", "prealloc", "showmeta", "uid=", "umask=", "windows_names"},
	},
	{Name: "ntfs", Driver: NTFS, Like: NTFS},
	{Name: "msdos", Driver: "msdos", Like: VFAT, GroupByOption: true},
	{
		Name: NFS, Share: true, Apart: "nosharecache",
		Options: []string{
			"ac", "noac", "acdirmax=", "acdirmin=", "acregmax=", "acregmin=", "actimeo=", "acl", "noacl", "cto", "nocto", "fsc", "nofsc", "hard", "intr", "nointr",
			"local_lock=", "lock", "nolock", "lookupcache=", "max_connect=", "migration", "nomigration", "minorversion=", "mountport=", "mountproto=", "mountvers=",
			"nconnect=", "nfsvers=", "port=", "proto=", "rdirplus", "nordirplus", "rdma", "resvport", "noresvport", "retrans=", "retry=", "rsize=", "wsize=", "sec=",
			"sharecache", "nosharecache", "soft", "softerr", "softreval", "nosoftreval", "tcp", "timeo=", "trunkdiscovery", "notrunkdiscovery", "udp", "vers=", "xprtsec=",
		},
	},
	{Name: "nfs4", Share: true, Like: NFS, Apart: "nosharecache"},
	{Name: "cifs", Share: true, Apart: "nosharesock"},
	{Name: "smb3", Share: true, Apart: "nosharesock"},
}

// fs/ext4/ext4.h: s_errors, EXT4_ERRORS_PANIC.
var extPanic = &Panic{At: 1024 + 0x3c, Value: 3, Unless: "errors", Calm: "remount-ro"}
