package mounter

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// disk makes a loop device that is not formatted.
func disk(t *testing.T, size string) Device {
	img := filepath.Join(t.TempDir(), "disk")
	sh(t, "truncate", "-s", size, img)
	path := strings.TrimSpace(sh(t, "losetup", "-f", "--show", img))
	t.Cleanup(func() { sh(t, "losetup", "-d", path) })
	d, err := FindDevice(path)
	check(t, err)
	return d
}

// D01: a tenant who has the raw device may write mount options into its superblock. The kernel obeys them.
func TestD01_ASuperblocksOptionsPanicNoNode(t *testing.T) {
	d, r := disk(t, "16M"), openRoot(t)
	sh(t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.Path)
	sh(t, "tune2fs", "-E", "mount_opts=errors=panic", d.Path)
	mountAt(t, r, Filesystem{Device: d, Type: "ext4", NoPanic: true, ReadOnly: true}, "m")
	defer unmountAt(t, r, "m")
	s := lookAt(t, r, "m")
	defer s.Close()
	m, err := s.Mount()
	check(t, err)
	if strings.Contains(m.Options, "errors=panic") {
		t.Errorf("mounted with NoPanic: %s", m.Options)
	}
}

// D01: a superblock may name any device of the node as its journal.
func TestD01_AJournalOnAnotherDeviceIsUnknown(t *testing.T) {
	j, d := disk(t, "16M"), disk(t, "32M")
	sh(t, "mke2fs", "-q", "-b", "4096", "-O", "journal_dev", j.Path)
	sh(t, "mkfs.ext4", "-q", "-b", "4096", "-J", "device="+j.Path, d.Path)
	res, err := superblock.ProbeDevice(d.Path)
	check(t, err)
	if res.Content == superblock.Known {
		t.Errorf("probe: %+v", res)
	}
}

// A child of this process that is being started has a copy of each of its descriptors for a moment.
func TestOpenOutlastsAChildThatIsBeingStarted(t *testing.T) {
	d := disk(t, "16M")
	sh(t, "mkfs.ext4", "-q", d.Path)
	linux.Starting()()
	f, err := linux.Open(d.Path, os.O_RDONLY|linux.OExcl)
	check(t, err)
	time.AfterFunc(100*time.Millisecond, func() { f.Close() })
	if busy, err := Busy(d.Path); busy || err != nil { // Settle works here
		t.Fatal(busy, err)
	}
	linux.Starting()()
	f, err = linux.Open(d.Path, os.O_RDONLY|linux.OExcl)
	check(t, err)
	time.AfterFunc(100*time.Millisecond, func() { f.Close() })
	begin := time.Now()
	m, err := Open(Filesystem{Device: d, Type: "ext4"})
	if err != nil {
		t.Fatalf("after %v: %v", time.Since(begin), err)
	}
	m.Close()
}

// A FIFO is not waited for.
func TestNoDeviceIsAFIFO(t *testing.T) {
	p := filepath.Join(t.TempDir(), "fifo")
	check(t, syscall.Mkfifo(p, 0o600))
	for name, f := range map[string]func() error{
		"FindDevice": func() error { _, err := FindDevice(p); return err },
		"FindNamed":  func() error { _, err := FindNamed(p); return err },
		"Probe":      func() error { _, err := superblock.ProbeDevice(p); return err },
		"Busy":       func() error { _, err := Busy(p); return err },
	} {
		done := make(chan error, 1)
		go func() { done <- f() }()
		select {
		case err := <-done:
			t.Log(name, err)
		case <-time.After(2 * time.Second):
			t.Errorf("%s hangs", name)
			w, _ := os.OpenFile(p, os.O_WRONLY, 0)
			w.Close()
			<-done
		}
	}
}

// A05: a growth that the kernel puts off is no success.
func TestA05_BtrfsGrowsWhileABalanceRuns(t *testing.T) {
	img := filepath.Join(t.TempDir(), "disk")
	sh(t, "truncate", "-s", "2G", img)
	sh(t, "mkfs.btrfs", "-q", img)
	path := strings.TrimSpace(sh(t, "losetup", "-f", "--show", img))
	defer sh(t, "losetup", "-d", path)
	d, err := FindDevice(path)
	check(t, err)
	r := openRoot(t)
	mountAt(t, r, Filesystem{Device: d, Type: "btrfs"}, "m")
	defer unmountAt(t, r, "m")
	s := lookAt(t, r, "m")
	defer s.Close()
	at := filepath.Join(r.Path(), "m")
	// What a slow machine writes in this time, it also moves for some time.
	sh(t, "sh", "-c", "timeout 3 head -c 600M /dev/urandom > "+at+"/f; sync")
	dir, err := s.Dir()
	check(t, err)
	defer dir.Close()
	balance := exec.Command("btrfs", "balance", "start", "--full-balance", at)
	check(t, balance.Start())
	glob, _ := filepath.Glob("/sys/fs/btrfs/*/exclusive_operation")
	busy := ""
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && busy == ""; {
		for _, g := range glob {
			if b, _ := os.ReadFile(g); strings.TrimSpace(string(b)) == "balance" {
				busy = g
			}
		}
	}
	sh(t, "truncate", "-s", "4G", img)
	sh(t, "losetup", "-c", path)
	err = Grow(dir, "btrfs", d)
	b, _ := os.ReadFile(busy)
	u, uerr := s.Usage()
	check(t, uerr)
	t.Logf("exclusive_operation afterwards: %q; Grow: %v; %d bytes", b, err, u.TotalBytes)
	if err == nil && u.TotalBytes < 3<<30 {
		t.Errorf("Grow returned nil, and the file system still has %d bytes on a device of 4 GiB", u.TotalBytes)
	}
	t.Log(balance.Wait())
}

func TestIsPlaceholderOfWhatItCannotReach(t *testing.T) {
	p := filepath.Join(t.TempDir(), "file")
	check(t, os.WriteFile(p, nil, 0o600))
	if is, err := IsPlaceholder(p + "/below"); is || err != nil {
		t.Error(is, err)
	}
}

// An identity is that of the device, and not of what its path leads to by now.
func TestA10_TheIdentityIsTheDevicesOwn(t *testing.T) {
	a, b := disk(t, "16M"), disk(t, "16M")
	link := filepath.Join(t.TempDir(), "link")
	check(t, os.Symlink(a.Path, link))
	d, err := FindDevice(link)
	check(t, err)
	other, err := Identify(b)
	check(t, err)
	check(t, os.Remove(link))
	check(t, os.Symlink(b.Path, link))
	now, err := Identify(d) // d is still device a, by its numbers
	if err != nil || now.SameDisk(other) {
		t.Errorf("%v, %v: that is the identity of the device to which the path leads by now", now, err)
	}
}

// What this process lacks is no fault of a device.
func TestA11_HealthWithoutDescriptors(t *testing.T) {
	d := disk(t, "16M")
	if a := DeviceHealth(d); len(a) > 0 {
		t.Fatal(a)
	}
	noNode := d
	noNode.Path = "" // as State.Device returns it in a container with a /dev of its own
	if a := DeviceHealth(noNode); len(a) > 0 && a[0].Fatal {
		t.Errorf("%+v", a)
	}
	var was syscall.Rlimit
	check(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was))
	check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: was.Max}))
	a := DeviceHealth(d)
	check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was))
	if len(a) > 0 && a[0].Fatal {
		t.Errorf("%+v", a)
	}
}

// A write that failed is not the device's failure to be read: the first direct read after it gets its error.
func TestA05_AWriteThatFailedIsNoUnreadableDevice(t *testing.T) {
	dir := t.TempDir()
	check(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"))
	t.Cleanup(func() { check(t, syscall.Unmount(dir, 0)) })
	file := filepath.Join(dir, "disk")
	check(t, os.WriteFile(file, nil, 0o600))
	check(t, os.Truncate(file, 1<<20))
	path := strings.TrimSpace(sh(t, "losetup", "-f", "--show", file))
	t.Cleanup(func() { sh(t, "losetup", "-d", path) })
	dev, err := FindDevice(path)
	check(t, err)
	if err := os.WriteFile(filepath.Join(dir, "rest"), make([]byte, 512<<10), 0o600); err == nil {
		t.Fatal("the file system is not full")
	}
	f, err := os.OpenFile(dev.Path, os.O_WRONLY, 0)
	check(t, err)
	defer f.Close()
	if _, err := f.Write(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	if found := DeviceHealth(dev); len(found) != 0 {
		t.Errorf("%+v", found)
	}
}
