package mounter

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Device is a block device node.
type Device struct {
	Path         string
	Major, Minor uint32
	ReadOnly     bool // the device itself refuses writes
}

// Filesystem describes what to mount.
type Filesystem struct {
	Device  Device
	Type    string
	Options Options
	// ReadOnly makes this mount read-only. The superblock stays writable, unless the device is
	// read-only, so that other mounts of it may write.
	ReadOnly bool
	// Scratch is a directory for the one case that cannot be mounted detached: a SELinux label
	// on btrfs before Linux 6.8. Open creates and removes it.
	Scratch string
	// NoPanic adds errors=remount-ro for an ext2, ext3 or ext4 whose superblock asks for a panic. It reads
	// the device. It has no effect while the device is mounted, because the kernel shares the
	// superblock.
	NoPanic bool
}

// Detached is a mount that is attached nowhere. Only this process sees it, and it disappears
// with the process. Close releases it, whether or not it was attached.
type Detached struct {
	mount *os.File
	isDir bool
	what  string
}

// Open mounts a file system detached, from fsopen(2) to fsmount(2). If the device is mounted
// already, the kernel shares that superblock and ignores the superblock options given here. The
// caller must compare them (see Busy). A path that leads to a device with other numbers is a fault
// State. Options are not checked for safety: see CheckOptions and Filesystem.NoPanic.
func Open(fs Filesystem) (*Detached, error) {
	if err := CheckLabels(fs.Options); err != nil {
		return nil, err
	}
	if err := fs.leadsToDevice(); err != nil {
		return nil, err
	}
	if fs.NoPanic {
		var err error
		if fs, err = withoutPanic(fs); err != nil {
			return nil, err
		}
	}
	d, err := open(fs)
	if err != nil && fstype.Of(fs.Type).LabelByMount && fs.Options.Labels() && fs.Scratch != "" {
		var cerr error
		if d, cerr = openClassic(fs); cerr == nil {
			err = nil
		}
	}
	if err != nil {
		return nil, err
	}
	if err := errors.Join(verifyLabel(fs.Options, d.Label), d.verifyDevice(fs)); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", d.what, err), d.Close())
	}
	if err := failpoint.Err("mount.detached"); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// leadsToDevice returns an error if the path leads to another device than the numbers say: a path such as /dev/sdb may lead to another
// disk by now. The kernel must not read that disk, and not write to it, as a mount that replays a journal does. A device without a path
// that can be looked at is left to the mount itself.
func (fs Filesystem) leadsToDevice() error {
	if fs.Device.Major == 0 || fstype.Of(fs.Type).Share {
		return nil
	}
	st, err := linux.StatxPath(fs.Device.Path)
	if errors.Is(err, linux.ENOENT) || err == nil && !st.IsBlock() {
		return nil // the mount says why
	}
	if err != nil {
		return fmt.Errorf("which device %s is: %w", fs.Device.Path, err)
	}
	if err := fs.Device.other(Device{Major: st.RdevMajor, Minor: st.RdevMinor}); err != nil {
		return fmt.Errorf("%s leads to another device: %w", fs.Device.Path, err)
	}
	return nil
}

// other returns an error if now is not d.
func (d Device) other(now Device) error {
	if now.Same(d) {
		return nil
	}
	return fault.New(fault.State, "that is the block device %d:%d now, and %d:%d was asked for", now.Major, now.Minor, d.Major, d.Minor)
}

// verifyDevice compares the device number of what is mounted with the requested one, for a path that changed meanwhile.
func (d *Detached) verifyDevice(fs Filesystem) error {
	t := fstype.Of(fs.Type)
	if fs.Device.Major == 0 || t.Share || t.Numberless {
		return nil
	}
	st, err := linux.StatxFile(d.mount)
	if err != nil {
		return err
	}
	return fs.Device.other(Device{Major: st.DevMajor, Minor: st.DevMinor})
}

func open(fs Filesystem) (*Detached, error) {
	var ctx *os.File
	var refusal error
	err := linux.Settle(func() (err error) {
		if ctx != nil {
			ctx.Close() // one that has failed is of no more use
		}
		refusal = nil
		if ctx, err = fsopen(fs.Type); err != nil {
			return err
		}
		if err := configure(ctx, fs); err != nil {
			return err
		}
		if err = linux.FsconfigCreate(ctx); err != nil {
			refusal = createError(fs, err, linux.FsContextLog(ctx))
		}
		return err
	})
	if ctx != nil {
		defer ctx.Close()
	}
	if err != nil {
		return nil, cmp.Or(refusal, err)
	}
	set, _ := fs.Options.attrs(fs.ReadOnly)
	mount, err := linux.Fsmount(ctx, int(set))
	if err != nil {
		return nil, fmt.Errorf("%s on %s: %w", fs.Type, fs.Device.Path, err)
	}
	return &Detached{mount: mount, isDir: true, what: fs.Type + " on " + fs.Device.Path}, nil
}

func fsopen(fstype string) (*os.File, error) {
	ctx, err := linux.Fsopen(fstype)
	if errors.Is(err, linux.ENODEV) {
		return nil, fault.New(fault.State, "this kernel (%s) knows no file system %q, and no module of that name could be loaded",
			linux.Uname(), fstype)
	}
	return ctx, err
}

func configure(ctx *os.File, fs Filesystem) error {
	if err := linux.FsconfigString(ctx, "source", fs.Device.Path); err != nil {
		return fmt.Errorf("%s on %s: %w", fs.Type, fs.Device.Path, err)
	}
	if fs.Device.ReadOnly {
		if err := linux.FsconfigFlag(ctx, "ro"); err != nil {
			return fmt.Errorf("%s on %s: %w", fs.Type, fs.Device.Path, err)
		}
	}
	return configureOptions(ctx, fs.Type, fs.Options)
}

func configureOptions(ctx *os.File, fstype string, options Options) error {
	for _, o := range options.Superblock {
		var err error
		if o.Value == "" {
			err = linux.FsconfigFlag(ctx, o.Key)
		} else {
			err = linux.FsconfigString(ctx, o.Key, o.Value)
		}
		if err != nil {
			said := linux.FsContextLog(ctx)
			if said == "" {
				said = err.Error()
			}
			if contextOptions[o.Key] {
				return fault.New(fault.Invalid,
					"mount option %q: the SELinux policy loaded on this node does not take that label; the kernel says: %s", o, said)
			}
			return fault.New(fault.Invalid, "mount option %q is not one that %s takes on this kernel; the kernel says: %s", o, fstype, said)
		}
	}
	return nil
}

func createError(fs Filesystem, err error, said string) error {
	if said == "" {
		said = "nothing more (see dmesg)"
	}
	where := fmt.Sprintf("%s on %s: %v; the kernel says: %s", fs.Type, fs.Device.Path, err, said)
	switch {
	case errors.Is(err, linux.EUCLEAN), errors.Is(err, linux.EBADMSG), errors.Is(err, linux.EIO):
		return fault.New(fault.State, "%s. The file system or the device is damaged and needs a person: restore a snapshot, or examine it with "+
			"fsck while no pod uses it, where what its pods wrote may be parsed", where)
	case errors.Is(err, linux.EBUSY):
		return fault.New(fault.State,
			"%s. It is in use in another way: mounted with another read-only state, or held by another program", where)
	case errors.Is(err, linux.EEXIST):
		return fault.New(fault.State, "%s. A file system with the same identity is mounted, as that of a volume's copy: unpublish that one "+
			"first, or use Linux 6.7", where)
	case errors.Is(err, linux.EROFS) && fs.Device.ReadOnly && fs.ReadOnly:
		return fault.New(fault.State, "%s. It was not unmounted cleanly, so its journal must be written, but the device is read-only: "+
			"start a pod once that may write to the volume", where)
	case errors.Is(err, linux.EROFS), errors.Is(err, linux.EACCES):
		return fault.New(fault.State, "%s. The device is read-only; publish the volume read-only", where)
	case errors.Is(err, linux.EINVAL) && len(fs.Options.Superblock) > 0:
		return fault.New(fault.Invalid, "%s. The options were: %s", where, fs.Options.SuperblockString())
	case errors.Is(err, linux.ENXIO), errors.Is(err, linux.ENOENT), errors.Is(err, linux.ENOTBLK):
		return fault.New(fault.State, "%s. The device is gone", where)
	}
	return fault.New(fault.Internal, "%s", where)
}

// OpenDevice makes a detached bind mount of a block device's node. A read-only mount does not
// prevent writes to the device; give a read-only Device for that. The device's path must be the node itself: FindNamed returns that
// for a link. A link is a fault.Invalid.
func OpenDevice(d Device) (*Detached, error) {
	node, err := linux.Openat(linux.CWD, d.Path, linux.OPath|linux.ONofollow, 0)
	if err != nil {
		return nil, err
	}
	defer node.Close()
	st, err := linux.StatxFile(node)
	if err != nil {
		return nil, err
	}
	if st.IsSymlink() {
		return nil, fault.New(fault.Invalid, "%s is a symbolic link; give the block device that it leads to", d.Path)
	}
	if !st.IsBlock() || st.RdevMajor != d.Major || st.RdevMinor != d.Minor {
		return nil, fault.New(fault.State, "%s is no longer the block device %d:%d", d.Path, d.Major, d.Minor)
	}
	clone, err := linux.OpenTreeClone(node)
	if err != nil {
		return nil, err
	}
	if err := failpoint.Err("mount.detached"); err != nil {
		return nil, errors.Join(err, clone.Close())
	}
	return &Detached{mount: clone, what: d.Path}, nil
}

// View describes how one mount shows its file system. Other mounts of the same superblock may
// show it differently.
type View struct {
	Options  Options // only the per-mount part is used
	ReadOnly bool
	IDMap    *IDMap // nil: ids as they are on disk
	// UserNamespace is the alternative to IDMap: the id map of an existing user namespace,
	// given by its open file (/proc/PID/ns/user).
	UserNamespace *os.File
}

func (v View) mapped() bool { return v.IDMap != nil || v.UserNamespace != nil }

// Clone makes another detached mount of the same file system. It is a bind mount and costs less
// than Open. It uses open_tree_attr(2) (Linux 6.15), or open_tree(2) and mount_setattr(2).
// Kernels before 6.15 refuse to clone a detached mount (EINVAL); see Change.
func (d *Detached) Clone(v View) (clone *Detached, err error) {
	err = v.with(func(attr linux.MountAttr) error {
		f, err := linux.OpenTreeAttr(d.mount, attr)
		if errors.Is(err, linux.ENOSYS) {
			if f, err = linux.OpenTreeClone(d.mount); err == nil {
				if err = linux.MountSetattr(f, attr, true); err != nil {
					err = errors.Join(err, f.Close())
				}
			}
		}
		clone = &Detached{mount: f, isDir: d.isDir, what: d.what}
		return err
	})
	if err != nil {
		return nil, d.viewError(v, err)
	}
	return clone, nil
}

// Change applies v to this mount with mount_setattr(2). The mount must not be attached yet.
func (d *Detached) Change(v View) error {
	err := v.with(func(attr linux.MountAttr) error { return linux.MountSetattr(d.mount, attr, true) })
	return d.viewError(v, err)
}

func (v View) with(f func(linux.MountAttr) error) error {
	set, clr := v.Options.attrs(v.ReadOnly)
	attr := linux.MountAttr{Set: set, Clear: clr}
	if !v.mapped() {
		return f(attr)
	}
	userns := v.UserNamespace
	if userns == nil {
		var err error
		if userns, err = v.IDMap.userns(); err != nil {
			return err
		}
	}
	attr.Set |= linux.MountAttrIdmap
	attr.Userns = userns
	return f(attr)
}

// ErrNoMountSetattr means that the kernel is older than Linux 5.12, or that a system call
// filter applies to this process.
var ErrNoMountSetattr = errors.New("this kernel has no mount_setattr")

// ErrNoIdmap means that this kernel cannot id-map the file system.
var ErrNoIdmap = errors.New("this kernel makes no idmapped mounts of this file system")

func (d *Detached) viewError(v View, err error) error {
	switch {
	case err == nil:
		return nil
	case v.mapped() && errors.Is(err, linux.EINVAL):
		return fault.New(fault.State, "%s: %w (Linux %s)", d.what, ErrNoIdmap, linux.Uname())
	case errors.Is(err, linux.ENOSYS):
		return fmt.Errorf("%s: %w: %w", d.what, ErrNoMountSetattr, err)
	case v.mapped() && errors.Is(err, linux.EPERM):
		return fault.New(fault.State, "%s: an idmapped mount cannot be mapped a second time", d.what)
	}
	return fmt.Errorf("%s: %w", d.what, err)
}

// Dir opens the root directory of the file system for reading. The caller must close it: an open
// directory keeps the file system in use.
func (d *Detached) Dir() (*os.File, error) {
	return linux.Openat(d.mount, ".", os.O_RDONLY|linux.ODirectory, 0)
}

// Attach makes the mount visible at the target. If the path does not lead to the mount
// afterwards, because somebody moved the directory during the call, it unmounts again and
// returns an error.
func (d *Detached) Attach(t *Target) error {
	place, err := t.prepare(d.isDir)
	if err != nil {
		return err
	}
	defer place.Close()
	if err := failpoint.Err("attach.before"); err != nil {
		return err
	}
	if err := linux.MoveMount(d.mount, place); err != nil {
		return fmt.Errorf("%s at %s: %w", d.what, t.Path, err)
	}
	failpoint.Hit("attach.after")
	st, err := linux.StatxFile(d.mount)
	if err == nil {
		var ok bool
		if ok, err = t.leadsTo(st.MountID); err == nil && !ok {
			err = fault.New(fault.State, "%s changed while %s was being mounted there; it was taken off again", t.Path, d.what)
		}
	}
	if err != nil {
		return errors.Join(err, linux.DetachFile(d.mount))
	}
	return nil
}

// Close releases the descriptor. It unmounts the file system if it was not attached.
func (d *Detached) Close() error { return d.mount.Close() }
