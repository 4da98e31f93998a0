package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// ownership compares giving a volume of many files to a group with the kubelet's own walk of the
// same files.
func (b *bench) ownership(files int) {
	walker, err := filepath.Abs("bin/kubelet-ownership")
	must(err)
	img := b.dir + "/files"
	f, err := os.Create(img)
	must(err)
	must(f.Truncate(24 << 30))
	must(f.Close())
	must(exec.Command("mkfs.ext4", "-q", "-N", strconv.Itoa(files+files/4+150000), "-E", "lazy_itable_init=0", img).Run())
	out, err := exec.Command("losetup", "-f", "--show", img).Output()
	must(err)
	dev := strings.TrimSpace(string(out))
	defer func() { must(exec.Command("losetup", "-d", dev).Run()) }()
	small := b.smallDevice()
	defer func() { must(exec.Command("losetup", "-d", small).Run()) }()
	volume := func(id, dev string) csiclient.Volume {
		return csiclient.Volume{ID: id, FSType: "ext4", Context: map[string]string{"device": dev, "fsGroupStrategy": "chown"}}
	}
	many, few := volume("many", dev), volume("few", small)
	at := b.kubelet + "/pods/files/mount"
	must(b.c.Stage(ctx, many))
	must(b.c.Publish(ctx, many, at, false))
	tree(at+"/tree", files)
	kubelet := func(dir string, gid int) (wall, cpu time.Duration) {
		c := exec.Command(walker, dir, strconv.Itoa(gid))
		out, err := c.Output()
		must(err)
		ns, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
		must(err)
		return time.Duration(ns), c.ProcessState.UserTime() + c.ProcessState.SystemTime()
	}
	ours := func(dir string, gid int, inodes ownership.Inodes) (wall, cpu time.Duration) {
		root, err := os.Open(dir)
		must(err)
		defer root.Close()
		before, begin := usage(), time.Now()
		_, err = ownership.Apply(context.Background(), root, uint32(gid), ownership.Always, inodes, &ownership.Progress{})
		must(err)
		return time.Since(begin), usage() - before
	}
	var walked ownership.Inodes // empty: every name is looked at
	ours(at, 5000, walked)      // warm, and in the state from which both start
	kw, kc := kubelet(at, 5000)
	ww, wc := ours(at, 5000, walked)
	// As a publish to the first pod: nobody else has the volume.
	must(b.c.Unpublish(ctx, many.ID, at))
	ow, oc := notInUse(dev, func(dir string) (wall, cpu time.Duration) { return ours(dir, 5000, ownership.InodesOf(dev, "ext4")) })
	must(b.c.Publish(ctx, many, at, false))
	name := fmt.Sprintf("%d files: ", files)
	b.row(name+"chown, nothing to change, warm", "the kubelet's walk", kw, ow, 0.05, false)
	b.row("CPU of it", "the kubelet's", kc, oc, 0.16, false)
	b.row("the same while another pod uses it", "the kubelet's walk", kw, ww, 0, false)
	b.row("CPU of it", "the kubelet's", kc, wc, 0, false)
	kw2, kc2 := kubelet(at, 5001)
	ow2, oc2 := ours(at, 5002, walked)
	b.row(name+"chown, everything to change", "the kubelet's walk", kw2, ow2, 0.40, false)
	b.row("CPU of it", "the kubelet's", kc2, oc2, 0.75, false)
	deep := at + "/deep"
	chain(deep, 400, 250)
	ours(at, 5002, walked)
	kd, _ := kubelet(deep, 5002)
	od, _ := ours(deep, 5002, walked)
	b.row("a chain of 400 directories, nothing to change", "the kubelet's walk", kd, od, 0.04, false)
	must(b.c.Unpublish(ctx, many.ID, at))

	// Whole calls through the driver.
	s := series{}
	must(b.c.Stage(ctx, few))
	held := b.kubelet + "/pods/held/mount"
	for _, v := range []csiclient.Volume{many, few} {
		w := v
		w.Group = "5002"
		must(b.c.Publish(ctx, w, at, false))
		must(b.c.Unpublish(ctx, v.ID, at))
	}
	heldFew := b.kubelet + "/pods/held-few/mount"
	must(b.c.Publish(ctx, many, held, false)) // so that no measured mount is the first
	must(b.c.Publish(ctx, few, heldFew, false))
	for range *rounds * 5 {
		for name, v := range map[string]csiclient.Volume{"many": many, "few": few} {
			plain, record, idmap := v, v, v
			record.Group = "5002"
			idmap.Group, idmap.Context = "6000", map[string]string{"device": v.Context["device"], "fsGroupStrategy": "idmap"}
			for how, w := range map[string]csiclient.Volume{"plain": plain, "record": record, "idmap": idmap} {
				s.time(how+" "+name, func() { must(b.c.Publish(ctx, w, at, false)) })
				must(b.c.Unpublish(ctx, w.ID, at))
			}
		}
	}
	b.row(name+"publish with a matching record", "the same of an empty volume", s.median("record few"), s.median("record many"), 1.2, false)
	b.row(name+"idmap publish", "plain publish", s.median("plain many"), s.median("idmap many"), 1.5, false)
	b.row(name+"idmap publish", "the same of an empty volume", s.median("idmap few"), s.median("idmap many"), 1.1, false)
	b.row(name+"another group, by idmap", "the kubelet's walk", kw2, s.median("idmap many"), 0.001, false)
	must(b.c.Unpublish(ctx, many.ID, held))
	must(b.c.Unpublish(ctx, few.ID, heldFew))
	must(b.c.Unstage(ctx, many.ID))
	must(b.c.Unstage(ctx, few.ID))
}

// notInUse mounts the device as the driver does while nothing else can see it.
func notInUse(dev string, f func(dir string) (wall, cpu time.Duration)) (wall, cpu time.Duration) {
	d, err := mounter.FindDevice(dev)
	must(err)
	m, err := mounter.Open(mounter.Filesystem{Device: d, Type: "ext4"})
	must(err)
	defer m.Close()
	root, err := m.Dir()
	must(err)
	defer root.Close()
	return f(fmt.Sprintf("/proc/self/fd/%d", root.Fd()))
}

func (b *bench) smallDevice() string {
	img := b.dir + "/few"
	f, err := os.Create(img)
	must(err)
	must(f.Truncate(1 << 30))
	must(f.Close())
	must(exec.Command("mkfs.ext4", "-q", img).Run())
	out, err := exec.Command("losetup", "-f", "--show", img).Output()
	must(err)
	return strings.TrimSpace(string(out))
}

func usage() time.Duration {
	var u syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// tree makes directories of a thousand files each.
func tree(dir string, files int) {
	must(os.Mkdir(dir, 0o755))
	for i := range files {
		sub := fmt.Sprintf("%s/d%d", dir, i/1000)
		if i%1000 == 0 {
			must(os.Mkdir(sub, 0o755))
		}
		must(syscall.Mknod(fmt.Sprintf("%s/f%d", sub, i), syscall.S_IFREG|0o644, 0))
	}
}

// chain makes nested directories with files in each.
func chain(dir string, depth, files int) {
	for range depth {
		must(os.Mkdir(dir, 0o755))
		for i := range files {
			must(syscall.Mknod(fmt.Sprintf("%s/f%d", dir, i), syscall.S_IFREG|0o644, 0))
		}
		dir += "/deeper"
	}
}
