// Command pod runs in a container, started by the tests of package adversary. It tries everything
// that its descriptors allow, prints one line "REACHED ..." for each thing that no pod may reach,
// and ends with "END".
//
//	pod raw NODE   all ioctls of loop and block devices on a device node
//	pod files DIR  all ioctls of the file systems, and trees that are hard on programs
//
// Both first try to escape through /proc, /sys and device nodes.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	escape()
	var err error
	switch os.Args[1] {
	case "raw":
		err = raw(os.Args[2])
	case "files":
		err = files(os.Args[2])
	}
	if err != nil {
		fmt.Println("FAILED", err)
		os.Exit(1)
	}
	fmt.Println("END")
}

func reached(format string, args ...any) { fmt.Printf("REACHED "+format+"\n", args...) }

// escape tries known ways out of a container.
func escape() {
	for _, path := range []string{"/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/kcore", "/proc/1/root/../../etc/shadow",
		"/dev/mem", "/dev/loop-control", "/dev/mapper/control"} {
		if f, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
			reached("%s for writing", path)
			f.Close()
		}
	}
	blocks, _ := filepath.Glob("/sys/block/*/queue/*")
	uevents, _ := filepath.Glob("/sys/block/*/uevent")
	for _, path := range append(blocks, uevents...) {
		if f, err := os.OpenFile(path, os.O_WRONLY, 0); err == nil {
			reached("%s for writing", path)
			f.Close()
		}
	}
	for minor := range 32 {
		node := fmt.Sprintf("/tmp/loop%d", minor)
		if err := unix.Mknod(node, unix.S_IFBLK|0o666, int(unix.Mkdev(7, uint32(minor)))); err == nil {
			if f, err := os.Open(node); err == nil {
				reached("loop device %d by a node of its own", minor)
				f.Close()
			}
		}
	}
	if unix.Mount("none", "/tmp", "tmpfs", 0, "") == nil {
		reached("a mount")
	}
	if unix.Unshare(unix.CLONE_NEWUSER|unix.CLONE_NEWNS) == nil {
		reached("a user namespace")
	}
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
	return errno
}

// raw tries every ioctl on a device node: with no argument, with small numbers, with a file of the
// volume's size, and with memory that holds zeros, ones and small numbers.
func raw(node string) error {
	f, err := os.OpenFile(node, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, 2)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt([]byte("mine"), size-512); err != nil {
		return err
	}
	decoy, err := os.OpenFile("/tmp/decoy", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := decoy.Truncate(size); err != nil {
		return err
	}
	done := 0
	try := func(request, arg uintptr) {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, arg); errno == 0 {
			done++
		}
	}
	for _, group := range []uintptr{0x4c00, 0x1200, 0x0300, 0x2200, 0x5300} {
		for number := range uintptr(0x100) {
			request := group + number
			// No ioctl is left out: none is known to wait for an answer or to end the program.
			for _, arg := range []uintptr{0, 1, 4096, decoy.Fd()} {
				try(request, arg)
			}
			for _, fill := range []byte{0, 1, 0xff} {
				memory := make([]byte, 8192)
				for i := range memory {
					memory[i] = fill
				}
				try(request, uintptr(unsafe.Pointer(&memory[0])))
			}
		}
	}
	// Ioctls that encode their size: block, device-mapper, NVMe, persistent reservations.
	for _, group := range []uintptr{0x12, 0xfd, 'N', 'p'} {
		for number := range uintptr(0x100) {
			for _, length := range []uintptr{4, 8, 16, 24, 40, 72, 312} {
				for direction := range uintptr(4) {
					memory := make([]byte, 8192)
					try(direction<<30|length<<16|group<<8|number, uintptr(unsafe.Pointer(&memory[0])))
				}
			}
		}
	}
	fmt.Println("ioctls that were taken:", done)
	// The last attempts: cut the device, move it, unbind it.
	for _, part := range [][2]uint64{{4096, 8192}, {0, 1 << 20}} {
		var info unix.LoopInfo64
		info.Offset, info.Sizelimit, info.Flags = part[0], part[1], 12
		ioctl(f, unix.LOOP_SET_STATUS64, unsafe.Pointer(&info))
	}
	ioctl(f, unix.LOOP_CLR_FD, nil)
	return nil
}

// files makes a tree that is hard to walk, copy, grow or remove.
func files(dir string) error {
	if err := os.Chdir(dir); err != nil {
		return err
	}
	f, err := os.OpenFile("file", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	root, err := os.Open(".")
	if err != nil {
		return err
	}
	defer root.Close()
	allIoctls(root)
	allIoctls(f)
	for b := range 256 {
		name := "n" + string([]byte{byte(b)}) + "\xff\x1b[2J"
		if err := os.WriteFile(name, nil, 0o644); err != nil && b != 0 && b != '/' {
			return fmt.Errorf("a name with byte %d: %w", b, err)
		}
	}
	for i := range 2000 {
		if err := os.Link("file", fmt.Sprintf("link%d", i)); err != nil {
			return err
		}
	}
	if err := os.Chmod("file", 0o6777); err != nil {
		return err
	}
	if unix.Mknod("device", unix.S_IFBLK|0o666, int(unix.Mkdev(7, 0))) == nil {
		reached("a device node on the volume")
	}
	for _, to := range []string{"/etc/shadow", "../../../../../../etc", "/proc/1/root", "loop"} {
		if err := os.Symlink(to, "to-"+filepath.Base(to)); err != nil {
			return err
		}
	}
	sparse, err := os.OpenFile("sparse", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer sparse.Close()
	for at := int64(1) << 20; at > 0 && at < 1<<62; at *= 2 {
		if _, err := sparse.WriteAt([]byte("x"), at); err != nil && !errors.Is(err, unix.EFBIG) && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("at %d: %w", at, err)
		}
	}
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i)
	}
	for i := range int64(48) {
		if _, err := f.WriteAt(block, i<<20); err != nil && !errors.Is(err, unix.ENOSPC) {
			return err
		}
		const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
		_ = unix.Fallocate(int(f.Fd()), punch, i<<20, 512<<10) // as much as the file system accepts
	}
	return deep(2500)
}

func deep(levels int) error {
	if err := os.Mkdir("deep", 0o755); err != nil {
		return err
	}
	if err := os.Chdir("deep"); err != nil {
		return err
	}
	for range levels {
		if err := os.Mkdir("d", 0o755); err != nil {
			return err
		}
		if err := os.Chdir("d"); err != nil {
			return err
		}
	}
	return nil
}

// allIoctls tries the ioctls of ext4, xfs, btrfs and of all file systems, with memory that holds
// zeros. Without capabilities most must be refused.
func allIoctls(f *os.File) {
	const dataLost = 0x8004587d // EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
	down := uint32(2)
	if ioctl(f, dataLost, unsafe.Pointer(&down)) == 0 {
		reached("a shutdown of the file system")
	}
	if ioctl(f, 0xc0045877, unsafe.Pointer(&down)) == 0 {
		reached("a freeze of the file system")
	}
	for _, group := range []uintptr{'f', 'X', 0x94, 'v', 0x15, 'r'} {
		for number := range uintptr(0x100) {
			for _, length := range []uintptr{0, 4, 8, 16, 28, 64, 128, 1024, 4096} {
				for direction := range uintptr(4) {
					memory := make([]byte, 8192)
					ioctl(f, direction<<30|length<<16|group<<8|number, unsafe.Pointer(&memory[0]))
				}
			}
		}
	}
}
