// Package mounter does with block devices and mounts what a volume driver needs: it
// prepares a mount detached, attaches it last, looks at what is mounted, grows and
// freezes a file system, and takes a mount off again. It uses the kernel's mount API
// (fsopen, fsconfig, fsmount, mount_setattr, move_mount) and starts no program.
//
// It is for a CSI driver's node side, and for the agent in a guest, on Linux 5.15 or
// newer, as root. Errors carry a [fault.Kind] and the kernel's own words.
//
// # The life of a mount
//
// The example of this package shows these steps; each may fail, and nothing has to be
// undone before the last but one:
//
//  1. [FindDevice] looks at a device node. [Open] mounts its file system detached: no
//     process sees that mount, and it disappears with the process.
//  2. What has to be true before anybody sees the volume is done now: package ownership
//     gives the files to a group, by way of [Detached.Dir]; [Detached.Change] makes the
//     mount read-only or id-mapped.
//  3. [Root.Target] opens the directory that the target lies in, and [Target.Prepare]
//     makes the target.
//  4. [Detached.Attach] makes the mount visible there, in one step, and looks afterwards
//     whether the path leads to it.
//  5. [Detached.Close]. An open Detached or [State] keeps a file system in use.
//  6. [Target.Look] tells what is mounted, from the kernel and not from a record.
//  7. [Target.Unmount] and [Target.Remove] take it away.
//
// # One device, many mounts
//
// The kernel has one superblock for all mounts of a device. Its options (a SELinux
// label, quota, errors=) are those of the first mount, and the kernel ignores those of
// a later one. [State.Differs] and [Options.SameSuperblock] find such a difference;
// whether it is an error is the caller's to say. Options of one mount (ro, noexec,
// nosuid, relatime) and id maps may differ: they are in [View].
//
// # What is safe when
//
// All functions may be called from several goroutines, but the methods of one Detached,
// Target or State may not. Two goroutines that change one target, or one device's file
// system, are not kept apart: a driver has a lock for each volume.
//
// Paths below a [Root] are resolved from its open directory and never through a symbolic
// link, so that a pod that can write there leads nobody astray. Nothing is removed
// recursively.
//
// [Busy], [Device.Held] and [Holders] look into other mount namespaces, as far as this
// process may. Nobody can tell of a namespace that no process is in and that only a
// descriptor holds; the kernel's refusal of an O_EXCL open tells then that somebody has
// the device.
//
// A kernel that lacks something says so in [Features], by trying and not by its version.
// [CannotTell] is never [No].
//
// # What it is not for
//
// It is no mount(8): options that a program handles in user space are refused, and so
// are bind and remount. It mounts at no path outside a Root. It does not make, check or
// repair file systems, which package fsprogs does, and does not know whether a device
// may be formatted, which package superblock proves.
//
// The API may change until 1.0.
package mounter
