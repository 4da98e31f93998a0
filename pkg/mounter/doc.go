// Package mounter does with block devices and mounts what a volume driver
// needs, by the kernel's mount API (fsopen, fsconfig, fsmount, mount_setattr,
// move_mount) and without starting a program: prepare a mount detached, attach
// it last, look at what is mounted, grow, freeze, and take off again.
//
// Use it for a CSI driver's node side on Linux 5.15 or newer. It is not for
// mounting at paths that no Root contains, nor a general mount(8): options that
// mount(8) handles in user space are refused.
//
// Paths under a directory that others can write to are reached by descriptor
// and never through a symbolic link; nothing is removed recursively. Errors
// carry a fault.Kind and the kernel's own words.
//
// The API may change until 1.0.
package mounter
