// Command bench measures the driver in one run against k8s.io/mount-utils doing the same work and
// against an empty call, and prints ratios of medians. Run it with `make bench`: it needs its own
// mount namespace.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	mount "k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

var (
	binary = flag.String("csi-node", "bin/csi-node", "the driver")
	rounds = flag.Int("n", 60, "rounds of each measurement")
	many   = flag.Int("mounts", 10000, "unrelated mounts in the second half")
	guest  = flag.String("guest", "", "measure volumes in a microVM instead, with the guest that is in this directory")
	agents = flag.Bool("agent", false, "measure calls through crust-agent instead")
	server = flag.String("serve-agent", "", "used by -agent: DRIVER,ENDPOINT")
	files  = flag.Int("files", 0, "measure giving this many files to a group instead; wants bin/kubelet-ownership")
	ctx    = context.Background()
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

type series map[string][]time.Duration

func (s series) time(name string, f func()) {
	begin := time.Now()
	f()
	s[name] = append(s[name], time.Since(begin))
}

func (s series) median(name string) time.Duration {
	d := slices.Clone(s[name])
	slices.Sort(d)
	return d[len(d)/2]
}

type bench struct {
	dir, kubelet string
	c            *csiclient.Client
	node         *exec.Cmd
	failed       bool
}

func main() {
	flag.Parse()
	must(os.Setenv("LC_ALL", "C")) // it reads what dumpe2fs prints
	if driver, endpoint, ok := strings.Cut(*server, ","); ok {
		serveAgent(driver, endpoint)
		return
	}
	dir, err := os.MkdirTemp("", "crust-bench-")
	must(err)
	b := &bench{dir: dir, kubelet: filepath.Join(dir, "kubelet")}
	defer b.cleanUp()
	must(os.Mkdir(b.kubelet, 0o755))
	// In memory, for both sides: mkdir and rmdir on a disk's journal would hide the difference.
	must(syscall.Mount("bench", b.kubelet, "tmpfs", 0, ""))
	b.start()
	if *files > 0 {
		fmt.Println("| what | against | measured | ratio | target |\n|---|---|---|---|---|")
		b.ownership(*files)
		return
	}
	if *guest != "" {
		fmt.Println("| what | against | measured | ratio | target |\n|---|---|---|---|---|")
		b.crust(*guest)
		return
	}
	if *agents {
		fmt.Println("| what | against | measured | ratio | target |\n|---|---|---|---|---|")
		b.agent()
		return
	}
	fmt.Printf("idle resident memory: %d MiB (target below 40)\n\n", b.resident())
	fmt.Println("| what | against | measured | ratio | target |\n|---|---|---|---|---|")
	few := b.all(10)
	b.unrelated(*many)
	lots := b.all(*many)
	for _, name := range []string{"stage + first publish", "publish", "unpublish", "stats"} {
		b.row(name+fmt.Sprintf(", %d mounts", *many), "itself with 10", few.median(name), lots.median(name), 1.3, false)
	}
	b.memory(1000)
	if b.failed {
		fmt.Println("\nA target was missed.")
	}
}

func (b *bench) start() {
	b.node = exec.Command(*binary, "--endpoint", "unix://"+b.dir+"/csi.sock", "--node-id", "bench",
		"--pool", "p=loop:"+b.dir+"/pool,overcommit=1000",
		"--allow-device", "/dev/loop*", "--state-dir", b.dir+"/state", "--kubelet-dir", b.kubelet)
	b.node.Stderr, _ = os.Create(b.dir + "/log")
	b.node.SysProcAttr = linux.KilledWithThread()
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the driver ends with the thread that started it
		started <- b.node.Start()
		select {}
	}()
	must(<-started)
	for range 500 {
		if _, err := os.Stat(b.dir + "/csi.sock"); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	var err error
	b.c, err = csiclient.Dial("unix://"+b.dir+"/csi.sock", b.kubelet)
	must(err)
	_, err = b.c.Probe(ctx, &csi.ProbeRequest{})
	must(err)
}

func (b *bench) cleanUp() {
	_ = b.node.Process.Signal(syscall.SIGTERM)
	_ = b.node.Wait()
	_ = syscall.Unmount(b.dir+"/unrelated", syscall.MNT_DETACH)
	_ = syscall.Unmount(b.kubelet, syscall.MNT_DETACH)
	must(os.RemoveAll(b.dir))
}

func (b *bench) resident() int {
	s, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.node.Process.Pid))
	must(err)
	for line := range strings.Lines(string(s)) {
		if f := strings.Fields(line); f[0] == "VmRSS:" {
			kb, err := strconv.Atoi(f[1])
			must(err)
			return kb / 1024
		}
	}
	return 0
}

// unrelated makes n bind mounts, as other pods do on a busy node.
func (b *bench) unrelated(n int) {
	root := b.dir + "/unrelated"
	must(os.MkdirAll(root, 0o755))
	must(syscall.Mount("bench", root, "tmpfs", 0, ""))
	must(os.Mkdir(root+"/src", 0o755))
	for i := range n {
		p := fmt.Sprintf("%s/pods/%08d/volumes/kubernetes.io~csi/pvc/mount", root, i)
		must(os.MkdirAll(p, 0o755))
		must(syscall.Mount(root+"/src", p, "", syscall.MS_BIND, ""))
	}
}

func (b *bench) row(what, against string, base, got time.Duration, target float64, atLeast bool) {
	ratio := float64(got) / float64(base)
	b.verdict(what, against, fmt.Sprintf("%s against %s", got.Round(time.Microsecond), base.Round(time.Microsecond)),
		ratio, target, atLeast)
}

func (b *bench) verdict(what, against, measured string, ratio, target float64, atLeast bool) {
	word, met := "at most", ratio <= target
	if atLeast {
		word, met = "at least", ratio >= target
	}
	mark := ""
	if target == 0 {
		fmt.Printf("| %s | %s | %s | %.3g | no target |\n", what, against, measured, ratio)
		return
	}
	if !met {
		mark, b.failed = " **missed**", true
	}
	fmt.Printf("| %s | %s | %s | %.3g | %s %g%s |\n", what, against, measured, ratio, word, target, mark)
}

// all measures everything once, with the current mounts.
func (b *bench) all(mounts int) series {
	s := series{}
	// In memory too: the disk writes a new superblock equally fast for both.
	img := fmt.Sprintf("%s/device-%d", b.kubelet, mounts)
	f, err := os.Create(img)
	must(err)
	must(f.Truncate(1 << 30))
	must(f.Close())
	out, err := exec.Command("losetup", "-f", "--show", img).Output()
	must(err)
	dev := strings.TrimSpace(string(out))
	defer func() { must(exec.Command("losetup", "-d", dev).Run()) }()
	v := csiclient.Volume{ID: fmt.Sprintf("static-%d", mounts), FSType: "ext4", Context: map[string]string{"device": dev}}
	must(b.c.Stage(ctx, v)) // formats it
	must(b.c.Unstage(ctx, v.ID))
	settle(dev, b.kubelet+"/settle")

	stage, target := b.kubelet+"/stage", b.kubelet+"/target"
	must(os.MkdirAll(stage, 0o755))
	utils := mount.New("")
	sfm := mount.NewSafeFormatAndMount(utils, utilexec.New())
	mine := b.kubelet + "/pods/x/volumes/mount"
	// In turns of ten, so that neither side pays for the other's cold caches and both meet changes
	// of the machine's load.
	const turn = 10
	for range (*rounds + turn - 1) / turn {
		for range turn {
			s.time("mount-utils stage + publish", func() {
				must(sfm.FormatAndMount(dev, stage, "ext4", nil))
				must(os.MkdirAll(target, 0o755))
				must(utils.Mount(stage, target, "", []string{"bind"}))
			})
			must(syscall.Unmount(target, 0))
			must(syscall.Unmount(stage, 0))
		}
		for range turn {
			must(os.MkdirAll(b.c.StagingPath(v.ID), 0o755))
			must(os.MkdirAll(filepath.Dir(mine), 0o755))
			s.time("stage + first publish", func() {
				s.time("(stage)", func() { must(b.c.Stage(ctx, v)) })
				s.time("(first publish)", func() { must(b.c.Publish(ctx, v, mine, false)) })
			})
			must(b.c.Unpublish(ctx, v.ID, mine))
			must(b.c.Unstage(ctx, v.ID))
		}
	}
	must(b.c.Stage(ctx, v))
	must(b.c.Publish(ctx, v, mine, false))
	second := b.kubelet + "/pods/x/volumes/second"
	for range *rounds * 10 {
		s.time("empty call", func() { _, err := b.c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}); must(err) })
		s.time("publish", func() { must(b.c.Publish(ctx, v, second, false)) })
		s.time("stats", func() {
			_, err := b.c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: second})
			must(err)
		})
		s.time("unpublish", func() { must(b.c.Unpublish(ctx, v.ID, second)) })
	}
	with := fmt.Sprintf(", %d mounts", mounts)
	b.row("stage + first publish of a clean ext4"+with, "mount-utils FormatAndMount + bind", s.median("mount-utils stage + publish"),
		s.median("stage + first publish"), 0.10, false)
	for name, target := range map[string]float64{"publish": 2.5, "unpublish": 2.5, "stats": 1.3} {
		b.row(map[string]string{"publish": "second publish"}[name]+strings.TrimPrefix(name, "publish")+with, "empty call",
			s.median("empty call"), s.median(name), target, false)
	}
	fmt.Printf("| of it: stage | | %s | | |\n| of it: first publish | | %s | | |\n", s.median("(stage)").Round(time.Microsecond),
		s.median("(first publish)").Round(time.Microsecond))
	must(b.c.Unpublish(ctx, v.ID, mine))
	must(b.c.Unstage(ctx, v.ID))
	b.callers(mounts, utils, dev, stage)
	return s
}

// settle waits until the kernel has finished the lazy initialisation of a new ext4. A volume in use
// needs none, and until it is done each mount starts a thread for it.
func settle(dev, dir string) {
	must(os.Mkdir(dir, 0o755))
	must(syscall.Mount(dev, dir, "ext4", 0, "init_itable=0"))
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		must(exec.Command("sync", "-f", dir).Run())
		out, err := exec.Command("dumpe2fs", dev).Output()
		must(err)
		if strings.Count(string(out), "ITABLE_ZEROED") == strings.Count(string(out), "(Blocks ") {
			break
		}
		if time.Now().After(deadline) {
			panic("lazy initialisation does not end")
		}
	}
	must(syscall.Unmount(dir, 0))
	must(os.Remove(dir))
}

// callers compares the mount engine, as a driver calls it, with mount-utils, as other drivers call
// it. 32 callers at once publish read-only, ask which device is mounted there (this makes a
// repeated call safe), and unpublish.
func (b *bench) callers(mounts int, utils mount.Interface, dev, stage string) {
	const n = 32
	root, err := mounter.OpenRoot(b.kubelet)
	must(err)
	defer root.Close()
	d, err := mounter.FindDevice(dev)
	must(err)
	// Other drivers bind from the staging path, so this engine clones from an open mount.
	live, err := mounter.Open(mounter.Filesystem{Device: d, Type: "ext4"})
	must(err)
	defer live.Close()
	must(utils.Mount(dev, stage, "ext4", nil))
	defer func() { must(syscall.Unmount(stage, 0)) }()
	for i := range n {
		must(os.MkdirAll(fmt.Sprintf("%s/pods/caller-%d", b.kubelet, i), 0o755))
	}
	ours := perSecond(n, 100**rounds, func(i int) {
		t, err := root.Target(fmt.Sprintf("%s/pods/caller-%d/mount", b.kubelet, i))
		must(err)
		m, err := live.Clone(mounter.View{ReadOnly: true})
		must(err)
		must(m.Attach(t))
		must(m.Close())
		s, err := t.Look()
		must(err)
		if shown, ok, err := s.Device(); err != nil || !ok || !shown.Same(d) {
			panic("another device is mounted")
		}
		s.Close()
		must(t.Unmount())
		must(t.Remove())
		must(t.Close())
	})
	theirs := perSecond(n, max(4**rounds*10/mounts, *rounds), func(i int) {
		target := fmt.Sprintf("%s/pods/utils-%d", b.kubelet, i)
		must(os.MkdirAll(target, 0o755))
		must(utils.Mount(stage, target, "", []string{"bind", "ro"}))
		if shown, _, err := mount.GetDeviceNameFromMount(utils, target); err != nil || shown != dev {
			panic(fmt.Sprint("another device is mounted: ", shown, err))
		}
		must(mount.CleanupMountPoint(target, utils, true))
	})
	want := 30.0
	if mounts > 10 {
		want = 200
	}
	b.verdict(fmt.Sprintf("32 callers: publish read-only, ask for the device, unpublish, by the engine; %d mounts", mounts),
		"mount-utils bind, GetDeviceNameFromMount, clean-up",
		fmt.Sprintf("%.0f/s against %.0f/s", ours, theirs), ours/theirs, want, true)
}

func perSecond(callers, pairs int, f func(i int)) float64 {
	begin := time.Now()
	var next atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for next.Add(1) <= int64(pairs) {
				f(i)
			}
		})
	}
	wg.Wait()
	return float64(pairs) / time.Since(begin).Seconds()
}

// memory publishes n volumes.
func (b *bench) memory(n int) {
	vols := make([]csiclient.Volume, n)
	at := func(i int) string { return fmt.Sprintf("%s/pods/m-%d/mount", b.kubelet, i) }
	for i := range vols {
		made, err := b.c.Create(ctx, fmt.Sprintf("m-%d", i), 8<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
		must(err)
		vols[i] = csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}
		must(b.c.Stage(ctx, vols[i]))
		must(b.c.Publish(ctx, vols[i], at(i), false))
	}
	fmt.Printf("\nresident memory with %d published volumes: %d MiB (target below 100)\n", n, b.resident())
	for i, v := range vols {
		must(b.c.Unpublish(ctx, v.ID, at(i)))
		must(b.c.Unstage(ctx, v.ID))
		must(b.c.Delete(ctx, v.ID))
	}
}
