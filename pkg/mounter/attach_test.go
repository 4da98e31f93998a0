package mounter

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

func TestMain(m *testing.M) {
	if slices.ContainsFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, "-test.fuzz") }) {
		os.Exit(m.Run()) // workers are killed at the end, in the middle of an input
	}
	dir, err := os.MkdirTemp("", "mounter-")
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err != nil {
		panic(err)
	}
	code := m.Run()
	if left := leftovers(dir); left != "" {
		println("left by the tests:\n" + left)
		code = 1
	}
	if err := os.Remove(dir); err != nil {
		println("left by the tests:", err.Error())
		code = 1
	}
	os.Exit(code)
}

// leftovers lists open files, mounts and loop devices that belong to dir.
func leftovers(dir string) string {
	var left []string
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, f := range fds {
		l, _ := os.Readlink("/proc/self/fd/" + f.Name())
		if strings.HasPrefix(l, dir) || strings.HasPrefix(l, "/dev/loop") || l == "/" || strings.Contains(l, "fscontext") {
			left = append(left, "descriptor of "+l)
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	loops, _ := exec.Command("losetup", "-n", "-O", "NAME,BACK-FILE").Output()
	for line := range strings.Lines(string(mounts) + string(loops)) {
		if strings.Contains(line, dir) {
			left = append(left, line)
		}
	}
	return strings.Join(left, "\n")
}

func formatted(t *testing.T, fstype string) Device {
	t.Helper()
	img := filepath.Join(t.TempDir(), "disk")
	sh(t, "truncate", "-s", "320M", img)
	sh(t, "mkfs."+fstype, "-q", img)
	path := strings.TrimSpace(sh(t, "losetup", "-f", "--show", img))
	t.Cleanup(func() { sh(t, "losetup", "-d", path) })
	d, err := FindDevice(path)
	check(t, err)
	return d
}

func sh(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return string(out)
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func openRoot(t *testing.T) *Root {
	t.Helper()
	r, err := OpenRoot(t.TempDir())
	check(t, err)
	t.Cleanup(func() { check(t, r.Close()) })
	return r
}

func mountAt(t *testing.T, r *Root, fs Filesystem, name string) {
	t.Helper()
	target, err := r.Target(filepath.Join(r.Path(), name))
	check(t, err)
	defer target.Close()
	m, err := Open(fs)
	check(t, err)
	defer m.Close()
	check(t, m.Attach(target))
}

func unmountAt(t *testing.T, r *Root, name string) {
	t.Helper()
	target, err := r.Target(filepath.Join(r.Path(), name))
	check(t, err)
	defer target.Close()
	check(t, target.Unmount())
	check(t, target.Remove())
}

func TestMountsOfOneDevice(t *testing.T) {
	for _, fstype := range filesystems {
		t.Run(fstype, func(t *testing.T) {
			d, r := formatted(t, fstype), openRoot(t)
			fs := Filesystem{Device: d, Type: fstype}
			mountAt(t, r, fs, "rw")
			ro := fs
			ro.ReadOnly = true
			mountAt(t, r, ro, "ro")
			check(t, os.WriteFile(r.Path()+"/rw/f", []byte("x"), 0o600))
			if err := os.WriteFile(r.Path()+"/ro/g", nil, 0o600); !errors.Is(err, linux.EROFS) {
				t.Errorf("write to the read-only mount: %v", err)
			}
			target, err := r.Target(r.Path() + "/ro")
			check(t, err)
			s, err := target.Look()
			check(t, err)
			got, ok, err := s.Device()
			if err != nil || !ok || !got.Same(d) {
				t.Errorf("it shows device %+v, %v, %v; want %+v", got, ok, err, d)
			}
			if m, err := s.Mount(); err != nil || m.Type != fstype || !m.ReadOnly || m.ReadOnlySB {
				t.Errorf("mount: %+v %v", m, err)
			}
			if differs, err := s.Differs(ro); differs != "" || err != nil {
				t.Errorf("differs from itself: %s %v", differs, err)
			}
			if differs, _ := s.Differs(fs); differs == "" {
				t.Error("read-only is taken for read-write")
			}
			s.Close()
			check(t, target.Close())
			if busy, err := Busy(d.Path); !busy || err != nil {
				t.Errorf("busy: %v %v", busy, err)
			}
			unmountAt(t, r, "ro")
			unmountAt(t, r, "rw")
			if busy, err := Busy(d.Path); busy || err != nil {
				t.Errorf("busy after unmount: %v %v", busy, err)
			}
			bad, err := ParseOptions([]string{"nosuchoption"})
			check(t, err)
			if _, err := Open(Filesystem{Device: d, Type: fstype, Options: bad}); !fault.Is(err, fault.Invalid) ||
				!strings.Contains(err.Error(), "nosuchoption") {
				t.Errorf("an unknown option: %v", err)
			}
		})
	}
}

func TestDetachedMountVanishes(t *testing.T) {
	d := formatted(t, "ext4")
	before, err := os.ReadFile("/proc/self/mountinfo")
	check(t, err)
	m, err := Open(Filesystem{Device: d, Type: "ext4"})
	check(t, err)
	during, err := os.ReadFile("/proc/self/mountinfo")
	check(t, err)
	if !bytes.Equal(before, during) {
		t.Error("a detached mount is in the mount table")
	}
	check(t, m.Close())
	if busy, err := Busy(d.Path); busy || err != nil {
		t.Errorf("busy after close: %v %v", busy, err)
	}
}

// TestD05_SwappedInMidCall mounts on targets while somebody keeps exchanging their directory
// with a symbolic link that leads outside.
func TestD05_SwappedInMidCall(t *testing.T) {
	d, r := formatted(t, "ext4"), openRoot(t)
	outside := t.TempDir()
	pod, aside, link := r.Path()+"/pod", r.Path()+"/aside", r.Path()+"/link"
	check(t, os.Mkdir(pod, 0o755))
	check(t, os.Symlink(outside, link))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_ = os.Rename(pod, aside) // each may fail, because of the race
				_ = os.Rename(link, pod)
				_ = os.Rename(pod, link)
				_ = os.Rename(aside, pod)
			}
		}
	}()
	mounted := 0
	// A slow machine may need more rounds until one falls between two swaps.
	for round := 0; round < 4000 || mounted == 0 && round < 100_000; round++ {
		target, err := r.Target(pod + "/mount")
		if err != nil {
			continue
		}
		m, err := Open(Filesystem{Device: d, Type: "ext4"})
		check(t, err)
		if err := m.Attach(target); err == nil {
			mounted++
		}
		check(t, m.Close())
		// Check before anything is unmounted again.
		if left, _ := os.ReadDir(outside); len(left) > 0 {
			t.Fatalf("made outside: %v", left)
		}
		// The descriptor finds it, wherever the directory is now.
		if s, err := target.Look(); err == nil {
			if s.Occupant == MountPoint {
				s.Close()
				check(t, target.Unmount())
			}
			s.Close()
			check(t, target.Remove())
		}
		check(t, target.Close())
	}
	close(stop)
	<-stopped
	info, err := os.ReadFile("/proc/self/mountinfo")
	check(t, err)
	if strings.Contains(string(info), outside) || strings.Contains(string(info), r.Path()) {
		t.Errorf("mounts are left:\n%s", info)
	}
	if mounted == 0 {
		t.Error("nothing was ever mounted between the swaps")
	}
}

func TestFreezeAndGrow(t *testing.T) {
	for _, fstype := range filesystems {
		d, r := formatted(t, fstype), openRoot(t)
		fs := Filesystem{Device: d, Type: fstype}
		mountAt(t, r, fs, "m")
		thaw, err := Freeze(fs)
		check(t, err)
		done := make(chan error, 1)
		go func() { done <- os.WriteFile(r.Path()+"/m/f", []byte("x"), 0o600) }()
		select {
		case err := <-done:
			t.Errorf("%s: a frozen file system took a write: %v", fstype, err)
		case <-time.After(100 * time.Millisecond):
		}
		check(t, thaw())
		check(t, <-done)
		check(t, Thaw(fs)) // of one that is not frozen
		file := strings.TrimSpace(sh(t, "losetup", "-n", "-O", "BACK-FILE", d.Path))
		sh(t, "truncate", "-s", "640M", file)
		sh(t, "losetup", "-c", d.Path)
		m, err := Open(fs)
		check(t, err)
		dir, err := m.Dir()
		check(t, err)
		err = Grow(dir, fstype, d)
		usage, uerr := m.Usage()
		check(t, errors.Join(uerr, dir.Close(), m.Close()))
		switch {
		case NeverGrows(fstype) != nil:
			if err == nil || usage.TotalBytes > 320<<20 {
				t.Errorf("%s never grows: %v, %d bytes", fstype, err, usage.TotalBytes)
			}
		case GrowsOffline(fstype):
			if !errors.Is(err, ErrGrowOffline) {
				t.Errorf("%s without CAP_SYS_RESOURCE: %v", fstype, err)
			}
		case err != nil || usage.TotalBytes < 450<<20:
			t.Errorf("%s: %v, %d bytes", fstype, err, usage.TotalBytes)
		}
		unmountAt(t, r, "m")
	}
}

// A mount that somebody else made in scratch is taken over detached.
func TestMountByPath(t *testing.T) {
	d, r := formatted(t, "ext4"), openRoot(t)
	scratch := filepath.Join(t.TempDir(), "scratch")
	o, err := ParseOptions([]string{"commit=7,nodev"})
	check(t, err)
	m, err := OpenByPath(scratch, d.Path, "ext4", o, true, func(options []string) error {
		sh(t, "mount", "-t", "ext4", "-o", strings.Join(options, ","), d.Path, scratch)
		return nil
	})
	check(t, err)
	if _, err := os.Stat(scratch); !os.IsNotExist(err) {
		t.Errorf("scratch is left: %v", err)
	}
	target, err := r.Target(r.Path() + "/m")
	check(t, err)
	check(t, m.Attach(target))
	check(t, m.Close())
	check(t, target.Close())
	line := ""
	for l := range strings.Lines(sh(t, "cat", "/proc/self/mountinfo")) {
		if strings.Contains(l, r.Path()) {
			line = l
		}
	}
	if !strings.Contains(line, " ro,nodev") || !strings.Contains(line, "commit=7") {
		t.Errorf("mounted as %q", line)
	}
	unmountAt(t, r, "m")
	failed := errors.New("failed")
	_, err = OpenByPath(scratch, d.Path, "ext4", Options{}, false, func([]string) error { return failed })
	if _, serr := os.Stat(scratch); !errors.Is(err, failed) || !os.IsNotExist(serr) {
		t.Errorf("a mount that failed: %v; scratch: %v", err, serr)
	}
	// A mount that a crash left in scratch is unmounted.
	check(t, os.Mkdir(scratch, 0o700))
	sh(t, "mount", d.Path, scratch)
	check(t, ClearScratch(scratch))
}

// If /dev is not the host's, device nodes may be anywhere.
func TestTableFindsBoundDeviceNodes(t *testing.T) {
	r := openRoot(t)
	d := formatted(t, "ext4")
	d.Path = filepath.Join(t.TempDir(), "node")
	sh(t, "mknod", d.Path, "b", strconv.Itoa(int(d.Major)), strconv.Itoa(int(d.Minor)))
	target, err := r.Target(filepath.Join(r.Path(), "raw"))
	check(t, err)
	m, err := OpenDevice(d)
	check(t, err)
	check(t, m.Attach(target))
	check(t, m.Close())
	check(t, target.Close())
	table, err := r.Table()
	check(t, err)
	found := false
	for _, m := range table {
		got, ok, _ := m.Device()
		found = found || ok && got.Same(d)
	}
	if !found {
		t.Errorf("the bound node is not in the table: %+v", table)
	}
	unmountAt(t, r, "raw")
}

// A repeated publish that asks for another per-mount option is no repeat.
func TestDiffersSeesEachPerMountOption(t *testing.T) {
	options := []string{"", "nosuid", "nodev", "noexec", "noatime", "strictatime", "nodiratime", "nosymfollow"}
	for _, fstype := range filesystems {
		t.Run(fstype, func(t *testing.T) {
			d, r := formatted(t, fstype), openRoot(t)
			with := func(option string) Filesystem {
				o, err := ParseOptions([]string{option})
				check(t, err)
				return Filesystem{Device: d, Type: fstype, Options: o}
			}
			for _, has := range options {
				mountAt(t, r, with(has), "m")
				target, err := r.Target(filepath.Join(r.Path(), "m"))
				check(t, err)
				s, err := target.Look()
				check(t, err)
				for _, wants := range options {
					differs, err := s.Differs(with(wants))
					check(t, err)
					if (differs == "") != (has == wants) {
						t.Errorf("mounted with %q, and %q is asked for: %q", has, wants, differs)
					}
				}
				s.Close()
				check(t, target.Close())
				unmountAt(t, r, "m")
			}
		})
	}
}
