// Package confine runs the programs that make and check file systems with minimal access. They run as root on data that a tenant wrote.
//
// Such a program sees the programs and libraries of this machine and sysfs, all read-only, its device and, if there is one, the copy that
// it works on. It sees no other file and no process. It has no network and no capability. System calls that mount, enter namespaces or
// load code fail (see linux.Refuse). Its memory is limited, and it is the OOM killer's first choice. It has its own cgroup if possible
// (see Cgroups).
package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Memory is the limit of a program's address space, in bytes: e2fsck and xfs_repair need a few bytes for each block and inode of a large
// file system.
const Memory = 8 << 30

// Limits describe what a program may access.
type Limits struct {
	Device string   // opened under Inside's name
	Copy   *os.File // opened as CopyPath; nil for none
}

// CopyPath is the path of Limits.Copy inside.
const CopyPath = "/copy"

// Inside is the device's path inside: its own path if that is in /dev.
func Inside(device string) string {
	if clean := filepath.Clean(device); strings.HasPrefix(clean, "/dev/") {
		return clean
	}
	return "/dev/" + filepath.Base(device)
}

// Run starts a program and waits for it. The error is that of cmd.Start or cmd.Wait, or explains why the program could not be confined
// and was not started. started is called once the program has started, or once it is certain that it will not.
func Run(cmd *exec.Cmd, l Limits, started func()) error {
	var once sync.Once
	defer once.Do(started)
	if cmd.Err != nil {
		return cmd.Err
	}
	base, err := prepared()
	if err != nil {
		return cannot(err)
	}
	var device *os.File
	if l.Device != "" {
		if device, err = clone(l.Device); err != nil {
			return cannot(err)
		}
		defer device.Close()
	}
	var scratch *os.File
	if l.Copy != nil {
		if scratch, err = linux.OpenTreeClone(l.Copy); err != nil {
			return cannot(err)
		}
		defer scratch.Close()
	}
	var program *os.File
	if !visible(cmd.Path) {
		if program, err = clone(filepath.Dir(cmd.Path)); err != nil {
			return cannot(err)
		}
		defer program.Close()
		cmd.Path = filepath.Join(programDir, filepath.Base(cmd.Path))
	}
	group, err := ownOrNone()
	if err != nil {
		return cannot(err)
	}
	defer group.remove()
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	begun, limited := make(chan int, 1), make(chan error, 1)
	go func() {
		// Not on the program's thread, which has no /proc.
		if pid, ok := <-begun; ok {
			limited <- errors.Join(group.add(pid), linux.LimitMemory(pid, Memory))
		}
	}()
	defer close(begun)
	// The thread stays until the program has ended: linux.KilledWithThread. Go's child checks whether its parent died before that was
	// set; in its own PID namespace it cannot. A program that survives for that reason has its device open exclusively, so the next
	// program does not begin.
	return linux.OnOwnThread(func() error {
		if err := base.Enter(); err != nil {
			return cannot(err)
		}
		if err := furnish(program, scratch, device, l.Device); err != nil {
			return cannot(err)
		}
		if err := errors.Join(linux.DropCapabilities(), linux.NoNewPrivileges(), linux.Refuse()); err != nil {
			return cannot(err)
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		once.Do(started)
		begun <- cmd.Process.Pid
		if err := <-limited; err != nil {
			return errors.Join(fmt.Errorf("the program was ended, for its memory cannot be limited: %w", err), cmd.Process.Kill(),
				cmd.Wait())
		}
		return cmd.Wait()
	})
}

func cannot(err error) error {
	return fmt.Errorf("the program was not started, for it cannot be confined: %w", err)
}

// base holds the namespaces in which all programs begin. They are made once: a copy of this process's mount namespace costs time for each
// mount, and keeps all mounts in use meanwhile.
var base struct {
	sync.Mutex
	linux.Namespaces
}

func prepared() (linux.Namespaces, error) {
	base.Lock()
	defer base.Unlock()
	if base.Namespaces != nil {
		return base.Namespaces, nil
	}
	// Before it starts or finds its first process, Go uses a child once to detect pidfds. In a new PID namespace, that child would be the
	// first process, and no process can start after it ends.
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		return nil, err
	}
	if err := self.Release(); err != nil {
		return nil, err
	}
	made, err := linux.NewNamespaces(build)
	if err == nil {
		base.Namespaces = made
	}
	return made, err
}

// programDir is the mount point inside for a program outside the directories of shown.
const programDir = "/program"

// What is visible of this machine: programs and libraries, and the configuration of the dynamic linker, mke2fs and e2fsck.
var (
	shown         = []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr"}
	configuration = []string{"etc/ld.so.cache", "etc/mke2fs.conf", "etc/e2fsck.conf"}

	alwaysThere = []string{"null", "zero", "random", "urandom"} // in /dev
)

// build makes the programs' root directory the root of this mount namespace.
func build() error {
	root, err := tree("tmpfs", map[string]string{"size": "16m", "mode": "755"})
	if err != nil {
		return err
	}
	defer root.Close()
	clones := map[string]*os.File{}
	defer func() {
		for _, f := range clones {
			f.Close()
		}
	}()
	// There is no /proc: it would show other processes and, through them, their files. The mount tables are empty. The programs open
	// their device exclusively; the kernel refuses that while it is mounted.
	links, files := map[string]string{}, []string{"etc/mtab", "proc/mounts", "proc/self/mounts", CopyPath[1:]}
	for _, name := range append([]string{"sys"}, shown...) {
		switch to, err := os.Readlink("/" + name); {
		case err == nil:
			links[name] = to
		case errors.Is(err, fs.ErrNotExist):
		default:
			if clones[name], err = clone("/" + name); err != nil {
				return err
			}
		}
	}
	configured := map[string]*os.File{}
	for _, name := range configuration {
		f, err := clone("/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		defer f.Close()
		configured[name] = f
	}
	devices := map[string]*os.File{}
	for _, name := range alwaysThere {
		if devices[name], err = clone("/dev/" + name); err != nil {
			return err
		}
		defer devices[name].Close()
	}
	if err := mountOn(root, "/proc"); err != nil { // any directory: it is the root from now on
		return err
	}
	if err := linux.PivotRoot(root); err != nil {
		return err
	}
	for _, dir := range []string{"/etc", "/dev", "/proc", "/proc/self", programDir} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	for name, f := range devices {
		if err := node(f, "/dev/"+name); err != nil {
			return err
		}
	}
	for name, to := range links {
		if err := os.Symlink(to, "/"+name); err != nil {
			return err
		}
	}
	for _, name := range files {
		if err := linux.MakeFile("/" + name); err != nil {
			return err
		}
	}
	for name, f := range configured {
		if err := errors.Join(readOnly(f), node(f, "/"+name)); err != nil {
			return err
		}
	}
	for name, f := range clones {
		if err := os.Mkdir("/"+name, 0o755); err != nil {
			return err
		}
		if err := errors.Join(readOnly(f), mountOn(f, "/"+name)); err != nil {
			return err
		}
	}
	return readOnly(root)
}

// readOnly makes a mount read-only. The kernel refuses that (EBUSY) while a file on it is open for writing. A child that another thread
// forks can keep a file open after this process closed it, so linux.MakeFile makes files without opening them.
func readOnly(mount *os.File) error {
	return linux.MountSetattr(mount, linux.MountAttr{Set: linux.MountAttrRdonly}, false)
}

// furnish mounts the program's own files: its device, and those that every program may open.
func furnish(program, scratch, device *os.File, path string) error {
	if scratch != nil {
		if err := mountOn(scratch, CopyPath); err != nil {
			return err
		}
	}
	if program != nil {
		if err := mountOn(program, programDir); err != nil {
			return err
		}
	}
	dev, err := tree("tmpfs", map[string]string{"size": "1m", "mode": "755"})
	if err != nil {
		return err
	}
	defer dev.Close()
	var always []*os.File
	for _, name := range alwaysThere {
		f, err := clone("/dev/" + name)
		if err != nil {
			return err
		}
		defer f.Close()
		always = append(always, f)
	}
	if err := mountOn(dev, "/dev"); err != nil {
		return err
	}
	for i, name := range alwaysThere {
		if err := node(always[i], "/dev/"+name); err != nil {
			return err
		}
	}
	if device != nil {
		if err := node(device, Inside(path)); err != nil {
			return err
		}
	}
	return readOnly(dev)
}

// node shows a device, or another file, under a path.
func node(file *os.File, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := linux.MakeFile(path); err != nil {
		return err
	}
	return mountOn(file, path)
}

func visible(program string) bool {
	for _, dir := range shown {
		if strings.HasPrefix(program, "/"+dir+"/") {
			return true
		}
	}
	return false
}

// tree makes a new file system that is not in any namespace yet.
func tree(fstype string, options map[string]string) (*os.File, error) {
	c, err := linux.Fsopen(fstype)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for k, v := range options {
		if err := linux.FsconfigString(c, k, v); err != nil {
			return nil, fmt.Errorf("%s with %s=%s: %w", fstype, k, v, err)
		}
	}
	if err := linux.FsconfigCreate(c); err != nil {
		return nil, err
	}
	return linux.Fsmount(c, linux.MountAttrNosuid)
}

// clone makes a bind mount of a directory or file that is not in any namespace yet.
func clone(path string) (*os.File, error) {
	f, err := linux.Open(path, linux.OPath)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return linux.OpenTreeClone(f)
}

func mountOn(mount *os.File, path string) error {
	at, err := linux.Open(path, linux.OPath)
	if err != nil {
		return err
	}
	defer at.Close()
	return linux.MoveMount(mount, at)
}
