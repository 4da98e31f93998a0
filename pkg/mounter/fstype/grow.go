package fstype

import (
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
)

func growExt(dir *os.File, size int64, found func() (size, block int64, err error)) error {
	now, block, err := found()
	if err != nil || now/block >= size/block {
		return err
	}
	return linux.Ext4ResizeFS(dir, uint64(size/block))
}

func growXFS(dir *os.File, size int64, _ func() (size, block int64, err error)) error {
	g, err := linux.XFSGeometryOf(dir)
	if err != nil {
		return err
	}
	if blocks := uint64(size) / uint64(g.BlockSize); blocks > g.DataBlocks {
		return linux.XFSGrowData(dir, blocks, g.ImaxPct)
	}
	return nil
}

func growBtrfs(dir *os.File, size int64, _ func() (size, block int64, err error)) error {
	device, err := linux.BtrfsDevice(dir)
	if err != nil {
		return err
	}
	total, err := linux.BtrfsDeviceSize(dir, device)
	if err != nil {
		return err
	}
	const sector = 4096
	if total >= uint64(size)&^(sector-1) {
		return nil
	}
	return linux.BtrfsResizeMax(dir, device)
}
