package crust

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// raw gives a container a block device of the host, as containerd does for a raw block volume.
func (s spec) raw(t testing.TB, path, device, access string) spec {
	t.Helper()
	st, err := linux.StatxPath(device)
	ok(t, err)
	l := s["linux"].(map[string]any)
	devices, _ := l["devices"].([]any)
	l["devices"] = append(devices, map[string]any{"path": path, "type": "b", "major": st.RdevMajor, "minor": st.RdevMinor,
		"fileMode": 0o660, "uid": 0, "gid": 0})
	resources, _ := l["resources"].(map[string]any)
	if resources == nil {
		resources = map[string]any{"devices": []any{map[string]any{"allow": false, "access": "rwm"}}}
		l["resources"] = resources
	}
	resources["devices"] = append(resources["devices"].([]any), map[string]any{"allow": true, "type": "b", "major": st.RdevMajor,
		"minor": st.RdevMinor, "access": access})
	return s
}

// loop makes a loop device of a file.
func loop(t testing.TB, size int64, options ...string) (file, device string) {
	t.Helper()
	return loopIn(t, t.TempDir(), size, options...)
}

func loopIn(t testing.TB, dir string, size int64, options ...string) (file, device string) {
	t.Helper()
	file = filepath.Join(dir, "file")
	ok(t, os.WriteFile(file, nil, 0o600))
	ok(t, os.Truncate(file, size))
	device = strings.TrimSpace(run(t, "losetup", append(options, "-f", "--show", file)...))
	t.Cleanup(func() { run(t, "losetup", "-d", device) })
	return file, device
}

// A raw block volume is a disk of the guest, and a device of its container alone: also outside of /dev, and with a read-only root file
// system. It grows while it is used, its read-only kind cannot be written to, one whose pool is full gives errors while the guest goes on,
// and at the end the host has what was written.
func TestC24_ARawBlockVolumeInAMicroVM(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	const size = 32 << 20
	file, device := loop(t, size, "--sector-size", "4096")
	other, readable := loop(t, size)
	ok(t, os.WriteFile(other, append([]byte("from the host\n"), make([]byte, size-14)...), 0o600))
	small := t.TempDir()
	run(t, "mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small)
	t.Cleanup(func() { run(t, "umount", small) })
	_, full := loopIn(t, small, size)
	pause := r.pod(t, "raw", "")
	script := func(text string) []string { return []string{"/bin/busybox", "sh", "-c", text} }

	one, err := r.start(t, "one", r.spec(t, "raw", "container", script(`
		echo -n begin | dd of=/dev/xvda conv=notrunc 2>/dev/null
		head -c 14 /blocks/ro; dd if=/dev/zero of=/blocks/ro bs=4096 count=1 2>/dev/null || echo refused
		ls -ln /dev/xvda; echo sectors $(blockdev --getss /dev/xvda) $(blockdev --getss /blocks/ro)
		dd if=/dev/zero of=/dev/full-pool bs=1M count=16 conv=fsync 2>/dev/null || echo no room
		echo up; while [ "$(blockdev --getsize64 /dev/xvda)" = `+fmt.Sprint(size)+` ]; do busybox sleep 0.1; done
		echo grown $(blockdev --getsize64 /dev/xvda); echo -n end | dd of=/dev/xvda bs=1M seek=63 conv=notrunc 2>/dev/null
		exec 3<>/dev/xvda; dd bs=1M count=2 <&3 >/dev/null 2>&1; echo written
		while [ ! -e /tmp/go ]; do busybox sleep 0.1; done; echo -n last >&3; echo wrote last; busybox sleep 100000`)...).
		raw(t, "/dev/xvda", device, "rwm").raw(t, "/blocks/ro", readable, "rm").raw(t, "/dev/full-pool", full, "rwm"))
	ok(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("one wrote:\n%s", one.text(t))
		}
	})
	eventually(t, testcrust.Longest(), "it begins", func() bool { return strings.Contains(one.text(t), "up\n") })
	ok(t, os.Truncate(file, 2*size))
	run(t, "losetup", "-c", device)
	eventually(t, testcrust.Longest(), "it has grown", func() bool { return strings.Contains(one.text(t), "written") })
	for _, want := range []string{"from the host\n", "refused\n", "no room\n", "brw-rw----", "sectors 4096 512\n",
		fmt.Sprintf("grown %d\n", 2*size)} {
		if !strings.Contains(one.text(t), want) {
			t.Errorf("%q is missing", want)
		}
	}

	// The guest's root writes to all of its disks.
	out, err := (&machine{t: t, s: s, id: "raw"}).Exec(
		`for d in /dev/sd?; do echo -n guest | busybox dd of=$d bs=1M seek=1 conv=notrunc || echo refused; done`)
	if err != nil || strings.Count(out, "refused") != 1 || !strings.Contains(out, "Read-only file system") {
		t.Errorf("the guest's root writes to the read-only volume: %s %v", out, err)
	}

	// A container whose root file system is read-only has it too, beside the first, where the image has no such file. This one may only
	// read it.
	two, err := r.start(t, "two", r.spec(t, "raw", "container", script(`head -c 5 /not/there/xvdb; echo
		echo x 2>/dev/null > /not/there/xvdb || echo read-only`)...).readOnly().raw(t, "/not/there/xvdb", device, "rm"))
	ok(t, err)
	status, said := two.wait(t), two.text(t)
	if status != 0 || !strings.Contains(said, "begin\n") || !strings.Contains(said, "read-only\n") {
		t.Errorf("%d %q", status, said)
	}
	r.delete(t, "two")
	if _, err := r.start(t, "three", r.spec(t, "raw", "container", script("true")...).raw(t, "/dev/x", readable, "rwm")); err == nil ||
		!strings.Contains(err.Error(), "in one way only") {
		t.Errorf("a second container that writes to what another has read-only: %v", err)
	}

	// What is mounted on the host is nobody's raw device.
	_, mounted := loop(t, 32<<20)
	run(t, "mkfs.ext4", "-q", mounted)
	at := t.TempDir()
	run(t, "mount", mounted, at)
	t.Cleanup(func() { run(t, "umount", at) })
	if _, err := r.start(t, "four", r.spec(t, "raw", "container", script("true")...).raw(t, "/dev/x", mounted, "rwm")); err == nil ||
		!strings.Contains(err.Error(), mounted+" is in use on the host") {
		t.Errorf("a device that is mounted: %v", err)
	}

	// The pod ends while its process has the device open, and has just written.
	if out, status := r.exec(t, "one", "/bin/busybox", "touch", "/tmp/go"); status != 0 {
		t.Errorf("%d %s", status, out)
	}
	eventually(t, testcrust.Longest(), "it writes", func() bool { return strings.Contains(one.text(t), "wrote last") })
	// What cannot be written is not lost without a word.
	r.exec(t, "one", "/bin/busybox", "dd", "if=/dev/zero", "of=/dev/full-pool", "bs=1M", "count=16")
	r.end(t, pause)
	one.wait(t)
	r.delete(t, "one")
	b, err := os.ReadFile(filepath.Join(r.pods, ".ended", "raw.log"))
	if err != nil || !strings.Contains(string(b), "what its containers wrote last may be lost") {
		t.Errorf("the log of the pod: %v %s", err, b)
	}
	b, err = os.ReadFile(file)
	ok(t, err)
	for at, want := range map[int]string{0: "begin", 1 << 20: "guest", 2 << 20: "last", 63 << 20: "end"} {
		if got := string(b[at : at+len(want)]); got != want {
			t.Errorf("the host has %q at %d, not %q", got, at, want)
		}
	}
	b, err = os.ReadFile(other)
	ok(t, err)
	if string(b[:14]) != "from the host\n" || b[1<<20] != 0 {
		t.Errorf("the read-only device has %q and %q", b[:14], b[1<<20:1<<20+5])
	}
}

// A read-only root file system gets the mount points that its image lacks, as with runc on the host.
func TestC24_MountPointsInAReadOnlyRoot(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	pause := r.pod(t, "ro", "")
	conf := t.TempDir()
	ok(t, os.WriteFile(filepath.Join(conf, "f"), []byte("from the host\n"), 0o644))
	config := r.spec(t, "ro", "container", "/bin/busybox", "sh", "-c",
		`cat /var/run/secrets/f /etc/own; echo x 2>/dev/null > /there || echo read-only; echo x 2>/dev/null > /var/run/x || echo there too`).
		readOnly().add(mount("/var/run/secrets", "bind", conf, "rbind", "ro"), mount("/etc/own", "bind", filepath.Join(conf, "f"), "bind"))
	for range 2 { // what the first leaves does not disturb the second
		c, err := r.start(t, "one", config)
		ok(t, err)
		if status, said := c.wait(t), c.text(t); status != 0 || said != "from the host\nfrom the host\nread-only\nthere too\n" {
			t.Errorf("%d %q", status, said)
		}
		r.delete(t, "one")
	}
	// The host does not wait long for a slow guest.
	eventually(t, testcrust.Longest(), "the guest keeps nothing of its containers", func() bool {
		out, err := (&machine{t: t, s: s, id: "ro"}).Exec("cat /proc/mounts")
		ok(t, err)
		return !strings.Contains(out, "overlay")
	})
	r.end(t, pause)
}

func (s spec) readOnly() spec { s["root"].(map[string]any)["readonly"] = true; return s }
