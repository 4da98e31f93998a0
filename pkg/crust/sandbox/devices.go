package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Devices says which block devices may be handed to sandboxes (C20).
type Devices struct{ Allow []string }

// Find opens the way to an allowed device. The path itself must be among those
// allowed, as it is written: another name of the same device is not, and what a
// pattern matches is never a partition, which a pattern for disks would let in
// by chance.
func (d Devices) Find(path string) (mounter.Device, error) {
	refuse := func(why string) (mounter.Device, error) {
		return mounter.Device{}, fault.New(fault.Invalid, "device %q %s; --allow-device permits %s", path, why, strings.Join(d.Allow, ", "))
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsAny(path, "\x00\n") {
		return refuse("is no clean absolute path")
	}
	literal, matched := false, false
	for _, glob := range d.Allow {
		literal = literal || glob == path
		ok, err := filepath.Match(glob, path)
		matched = matched || err == nil && ok
	}
	if !literal && !matched {
		return refuse("is not allowed")
	}
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return mounter.Device{}, fault.New(fault.State, "device %s does not exist", path)
	}
	if err != nil {
		return mounter.Device{}, err
	}
	if real != path && !literal {
		return refuse("is a symbolic link to " + real + ", which a pattern does not permit")
	}
	found, err := mounter.FindDevice(real)
	if err != nil {
		return mounter.Device{}, err
	}
	if _, err := os.Stat(fmt.Sprintf("/sys/dev/block/%d:%d/partition", found.Major, found.Minor)); err == nil && !literal {
		return refuse("is a partition")
	}
	found.Path = path
	return found, nil
}

// superblockOptions are the options of file systems that may be asked for: a
// closed vocabulary, for what reaches the kernel of a sandbox comes from far
// away. A trailing "=" stands for any value.
var superblockOptions = []string{
	"context=", "fscontext=", "defcontext=", "rootcontext=",
	"discard", "nodiscard", "nouuid", "norecovery", "noload", "barrier", "nobarrier", "barrier=", "errors=", "commit=", "data=", "journal_checksum",
	"user_xattr", "nouser_xattr", "acl", "noacl", "usrquota", "grpquota", "prjquota", "uquota", "gquota", "pquota", "noquota", "quota",
	"stripe=", "max_batch_time=", "min_batch_time=", "delalloc", "nodelalloc", "init_itable=", "noinit_itable", "dioread_nolock", "dioread_lock",
	"allocsize=", "inode32", "inode64", "largeio", "nolargeio", "logbsize=", "logbufs=", "sunit=", "swidth=", "swalloc", "wsync", "filestreams", "ikeep", "noikeep",
	"autodefrag", "noautodefrag", "compress", "compress=", "compress-force=", "nodatacow", "datacow", "nodatasum", "datasum", "ssd", "nossd", "space_cache", "space_cache=",
	"subvol=", "subvolid=", "thread_pool=", "max_inline=", "discard=", "rescue=", "user_subvol_rm_allowed",
	"gid=", "uid=", "umask=", "fmask=", "dmask=", "iocharset=", "codepage=", "utf8",
}

func checkOptions(o mounter.Options) error {
	for _, opt := range o.Superblock {
		known := false
		for _, k := range superblockOptions {
			name, takes := strings.CutSuffix(k, "=")
			known = known || opt.Key == name && takes == (opt.Value != "")
		}
		if !known {
			return fault.New(fault.Invalid, "mount option %q is not one that a sandbox is asked for; allowed are %s, and those of the mount itself (ro, noatime, nosuid, ...)", opt, strings.Join(superblockOptions, ", "))
		}
	}
	return nil
}
