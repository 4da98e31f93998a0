// Package mounter provides what a volume driver needs for block devices and mounts. It prepares
// a mount detached and attaches it last. It inspects mounts, grows and freezes file systems,
// and unmounts. It uses the kernel's mount API (fsopen, fsconfig, fsmount, mount_setattr,
// move_mount) and starts no program. Package external mounts file systems that need a program (cifs).
//
// It is for the node side of a CSI driver and for the agent in a guest. It needs Linux 5.15 or
// newer and root. Errors carry a [fault.Kind] and the kernel's message.
//
// # The life of a mount
//
// The example of this package shows these steps. Each may fail. Until the mount is attached,
// Close undoes all of them:
//
//  1. [FindDevice] examines a device node. [Open] mounts its file system detached: no other
//     process sees that mount, and it disappears with this process.
//  2. Everything that must hold before anybody sees the volume is done now. Package ownership
//     gives the files to a group, through [Detached.Dir]. [Detached.Change] makes the mount
//     read-only or id-mapped.
//  3. [Root.Target] opens the parent directory of the target.
//  4. [Detached.Attach] creates the target and makes the mount visible there in one step.
//     Afterwards it verifies that the path leads to the mount.
//  5. [Detached.Close] releases the descriptor. An open Detached or [State], and a directory
//     from its Dir, keep the file system in use.
//  6. [Target.Look] reports what is mounted. It reads that from the kernel, not from a record.
//  7. [Target.Unmount] and [Target.Remove] undo the mount.
//
// # One device, many mounts
//
// The kernel has one superblock for all mounts of a device. The first mount sets its options (a
// SELinux label, quota, errors=), and the kernel ignores those of later mounts. So a driver
// records the options of the first mount and compares them with [Options.SameSuperblock].
// [State.Differs] compares the device and the per-mount options (ro, noexec, nosuid, nodev, noatime).
// Mounts of one superblock may differ in these and in their id maps, see [View].
//
// # Concurrency and security
//
// All functions are safe for concurrent use. The methods of one Detached, Target or State are
// not. The package does not serialize changes to one target, or to the file system of one
// device: a driver needs a lock for each volume.
//
// Paths below a [Root] are resolved from its open directory and never through a symbolic link,
// so a pod that can write there cannot redirect them. Nothing is removed recursively.
//
// [Busy], [Device.Held] and [Holders] also examine other mount namespaces, as far as this
// process may. Nobody can inspect a namespace that has no process and is held only by a
// descriptor. The kernel still refuses an O_EXCL open then, which shows that the device is in
// use.
//
// [Features] probes the kernel by trying each feature, not by its version. [CannotTell] is
// never [No].
//
// # What it is not for
//
// It does not replace mount(8). It refuses options that a program handles in user space, and
// bind and remount. It attaches only below a Root; the caller is responsible for the paths of
// [BindAt] and of scratch directories. It does not make, check or repair file systems: package
// fsprogs does. It does not know whether a device may be formatted: package superblock proves
// that.
//
// The API may change until 1.0.
package mounter
