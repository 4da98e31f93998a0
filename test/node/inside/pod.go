package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// asPod does what a pod's process can do with a block device node that it was given. Operations are
// NAME or NAME=ARGUMENT:
//
//	clear                   LOOP_CLR_FD
//	status=OFF,LIMIT,FLAGS  LOOP_SET_STATUS64; old-status=... is LOOP_SET_STATUS
//	change=FILE             LOOP_CHANGE_FD
//	configure=FILE          LOOP_CONFIGURE
//	set=FILE                LOOP_SET_FD
//	capacity, direct=0|1, blocksize=N
//	readwrite, readonly     BLKROSET 0 and 1
//	reread                  BLKRRPART
//	write=TEXT              at the beginning, and synced
//	read=N                  N bytes of the beginning
//	size
//	wait                    until standard input ends
func asPod(node string, ops []string) {
	runtime.LockOSThread() // capabilities belong to a thread
	check(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	for c := uintptr(0); unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0) == nil; c++ {
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	check(unix.Capset(&header, &none[0]))
	mode := os.O_RDWR
	f, err := os.OpenFile(node, mode, 0)
	if err != nil {
		f, err = os.Open(node)
	}
	check(err)
	for _, op := range ops {
		name, arg, _ := strings.Cut(op, "=")
		answer, err := do(f, name, arg)
		if err != nil {
			answer = err.Error()
		}
		fmt.Printf("%s: %s\n", op, answer)
	}
}

const loopChangeFD = 0x4c06

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func ioctl(f *os.File, request, arg uintptr) (string, error) {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, arg); e != 0 {
		return "", e
	}
	return "done", nil
}

func do(f *os.File, name, arg string) (string, error) {
	number, _ := strconv.ParseUint(arg, 10, 64)
	switch name {
	case "clear":
		return ioctl(f, unix.LOOP_CLR_FD, 0)
	case "status":
		var i unix.LoopInfo64
		if _, err := fmt.Sscanf(arg, "%d,%d,%d", &i.Offset, &i.Sizelimit, &i.Flags); err != nil {
			return "", err
		}
		return ioctl(f, unix.LOOP_SET_STATUS64, uintptr(unsafe.Pointer(&i)))
	case "old-status":
		var i unix.LoopInfo
		var limit uint64
		if _, err := fmt.Sscanf(arg, "%d,%d,%d", &i.Offset, &limit, &i.Flags); err != nil {
			return "", err
		}
		return ioctl(f, unix.LOOP_SET_STATUS, uintptr(unsafe.Pointer(&i)))
	case "change", "set", "configure":
		other, err := os.OpenFile(arg, os.O_RDWR, 0)
		if err != nil {
			return "", err
		}
		defer other.Close()
		config := unix.LoopConfig{Fd: uint32(other.Fd())}
		switch name {
		case "change":
			return ioctl(f, loopChangeFD, other.Fd())
		case "set":
			return ioctl(f, unix.LOOP_SET_FD, other.Fd())
		}
		return ioctl(f, unix.LOOP_CONFIGURE, uintptr(unsafe.Pointer(&config)))
	case "capacity":
		return ioctl(f, unix.LOOP_SET_CAPACITY, 0)
	case "direct":
		return ioctl(f, unix.LOOP_SET_DIRECT_IO, uintptr(number))
	case "blocksize":
		return ioctl(f, unix.LOOP_SET_BLOCK_SIZE, uintptr(number))
	case "readwrite", "readonly":
		on := int32(0)
		if name == "readonly" {
			on = 1
		}
		return ioctl(f, unix.BLKROSET, uintptr(unsafe.Pointer(&on)))
	case "reread":
		return ioctl(f, unix.BLKRRPART, 0)
	case "write":
		if _, err := f.WriteAt([]byte(arg), 0); err != nil {
			return "", err
		}
		return "done", f.Sync()
	case "read":
		b := make([]byte, number)
		n, err := f.ReadAt(b, 0)
		return string(b[:n]), err
	case "size":
		n, err := f.Seek(0, 2)
		return strconv.FormatInt(n, 10), err
	case "wait":
		var b [1]byte
		_, _ = os.Stdin.Read(b[:]) // wait until it ends
		return "done", nil
	}
	return "", fmt.Errorf("no such operation")
}
