//go:build !vm

package node

// filesystems are those that any kernel has on which these tests run.
var filesystems = []string{"ext4", "xfs", "btrfs"}
