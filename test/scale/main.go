// Command scale measures what grows with the number of volumes, publishes and files, and draws it:
// `make scale`. It needs root and a quiet machine.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
)

var (
	binary    = flag.String("csi-node", "bin/csi-node", "the driver")
	pictures  = flag.String("pictures", "docs/pictures", "where the pictures go")
	volumes   = flag.Int("volumes", 10000, "most volumes in a pool")
	published = flag.Int("published", 2000, "most volumes that are published")
	files     = flag.Int("files", 1000000, "most files of a volume that is given to a group")
	only      = flag.String("only", "", "measure only this: volumes, published or files")
	ctx       = context.Background()
)

func must(err error) {
	if err != nil {
		panic(err)
	}
}

type node struct {
	dir string
	cmd *exec.Cmd
	c   *csiclient.Client
}

func (n *node) kubelet() string { return filepath.Join(n.dir, "kubelet") }

// start starts the driver and returns the time until it answers.
func (n *node) start() time.Duration {
	log, err := os.OpenFile(filepath.Join(n.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(err)
	defer log.Close()
	endpoint := "unix://" + n.dir + "/csi.sock"
	n.cmd = exec.Command(*binary, "--endpoint", endpoint, "--node-id", "scale", "--pool", "pool=loop:"+n.dir+"/pool,overcommit=10000",
		"--state-dir", n.dir+"/state", "--kubelet-dir", n.kubelet(), "--idmap-probe=false")
	n.cmd.Stderr = log
	begin := time.Now()
	must(n.cmd.Start())
	for {
		if n.c, err = csiclient.Dial(endpoint, n.kubelet()); err == nil {
			if r, err := n.c.Probe(ctx, &csi.ProbeRequest{}); err == nil && r.GetReady().GetValue() {
				return time.Since(begin)
			}
			n.c.Close()
		}
		if time.Since(begin) > time.Minute {
			panic("the driver does not start; see " + log.Name())
		}
		time.Sleep(time.Millisecond)
	}
}

// kill is kill -9.
func (n *node) kill() {
	n.c.Close()
	must(n.cmd.Process.Kill())
	_ = n.cmd.Wait()
}

// status returns a kB line of /proc/PID/status in MiB.
func (n *node) status(name string) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.cmd.Process.Pid))
	must(err)
	kib, err := strconv.Atoi(regexp.MustCompile(name + `:\s+(\d+) kB`).FindStringSubmatch(string(b))[1])
	must(err)
	return float64(kib) / 1024
}

func (n *node) create(name string, size int64) csiclient.Volume {
	v := csiclient.Volume{FSType: "ext4"}
	made, err := n.c.Create(ctx, name, size, v, nil, nil)
	must(err)
	v.ID = made.GetVolumeId()
	return v
}

func (n *node) target(v csiclient.Volume) string {
	return filepath.Join(n.kubelet(), "pods", v.ID, "volumes/kubernetes.io~csi/pv/mount")
}

func median(of []time.Duration) float64 {
	slices.Sort(of)
	return float64(of[len(of)/2]) / 1e6
}

func timed(f func()) time.Duration {
	begin := time.Now()
	f()
	return time.Since(begin)
}

// steps returns from, ten times that, and so on, and most.
func steps(from, most int) []int {
	var list []int
	for n := from; n < most; n *= 10 {
		list = append(list, n)
	}
	return append(list, most)
}

const last = 20 // how many of the last calls are measured

func measureVolumes(n *node) []curve {
	create, list, ready, memory := curve{name: "CreateVolume, ms"}, curve{name: "ListVolumes, 100 a page, ms"},
		curve{name: "ready after kill -9, ms"}, curve{name: "memory, MiB"}
	have := 0
	var all []csiclient.Volume
	for _, want := range steps(10, *volumes) {
		var times []time.Duration
		for ; have < want; have++ {
			times = append(times, timed(func() { all = append(all, n.create(fmt.Sprint("v", have), 16<<20)) }))
		}
		create.add(want, median(times[max(0, len(times)-last):]))
		var pages []time.Duration
		for token := ""; ; {
			var r *csi.ListVolumesResponse
			var err error
			pages = append(pages,
				timed(func() { r, err = n.c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 100, StartingToken: token}) }))
			must(err)
			if token = r.GetNextToken(); token == "" {
				break
			}
		}
		list.add(want, median(pages))
		n.kill()
		ready.add(want, float64(n.start())/1e6)
		memory.add(want, n.status("VmRSS"))
	}
	for _, v := range all {
		must(n.c.Delete(ctx, v.ID))
	}
	return []curve{create, list, ready, memory}
}

func measurePublished(n *node) []curve {
	publish, stats, ready, memory := curve{name: "stage and publish, ms"}, curve{name: "NodeGetVolumeStats, ms"},
		curve{name: "ready after kill -9, ms"}, curve{name: "memory, MiB"}
	var all []csiclient.Volume
	for _, want := range steps(10, *published) {
		var times []time.Duration
		for len(all) < want {
			v := n.create(fmt.Sprint("p", len(all)), 16<<20)
			must(n.c.Stage(ctx, v)) // formats it
			must(n.c.Unstage(ctx, v.ID))
			times = append(times, timed(func() {
				must(n.c.Stage(ctx, v))
				must(n.c.Publish(ctx, v, n.target(v), false))
			}))
			all = append(all, v)
		}
		publish.add(want, median(times[max(0, len(times)-last):]))
		var looks []time.Duration
		for _, v := range all[len(all)-min(last, len(all)):] {
			looks = append(looks, timed(func() {
				_, err := n.c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: n.target(v)})
				must(err)
			}))
		}
		stats.add(want, median(looks))
		n.kill()
		ready.add(want, float64(n.start())/1e6)
		memory.add(want, n.status("VmRSS"))
	}
	for _, v := range all {
		must(n.c.Unpublish(ctx, v.ID, n.target(v)))
		must(n.c.Unstage(ctx, v.ID))
		must(n.c.Delete(ctx, v.ID))
	}
	return []curve{publish, stats, ready, memory}
}

func measureFiles(n *node) []curve {
	walk, memory := curve{name: "given to a group, ms for 1,000 files"}, curve{name: "most memory meanwhile, MiB"}
	const inode = 16 << 10 // ext4's bytes per inode
	v := n.create("files", max(64<<30, int64(*files)*inode*5/4))
	must(n.c.Stage(ctx, v))
	have := 0
	for i, want := range steps(1000, *files) {
		must(n.c.Publish(ctx, v, n.target(v), false))
		for ; have < want; have++ {
			dir := filepath.Join(n.target(v), fmt.Sprint(have/1000))
			if have%1000 == 0 {
				must(os.MkdirAll(dir, 0o755))
			}
			f, err := os.OpenFile(filepath.Join(dir, fmt.Sprint(have)), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			must(err)
			must(f.Close())
		}
		must(n.c.Unpublish(ctx, v.ID, n.target(v)))
		n.kill()
		n.start() // resets its peak
		v.Group = fmt.Sprint(5000 + i)
		took := timed(func() { must(n.c.Publish(ctx, v, n.target(v), false)) })
		walk.add(want, float64(took)/1e6/(float64(want)/1000))
		memory.add(want, n.status("VmHWM"))
		must(n.c.Unpublish(ctx, v.ID, n.target(v)))
		v.Group = ""
	}
	must(n.c.Unstage(ctx, v.ID))
	must(n.c.Delete(ctx, v.ID))
	return []curve{walk, memory}
}

func main() {
	flag.Parse()
	dir, err := os.MkdirTemp("", "crust-scale-")
	must(err)
	n := &node{dir: dir}
	must(os.Mkdir(n.kubelet(), 0o750))
	must(os.MkdirAll(*pictures, 0o755))
	n.start()
	for _, m := range []struct {
		name, x string
		measure func(*node) []curve
	}{
		{"volumes", "volumes in the pool", measureVolumes},
		{"published", "volumes published", measurePublished},
		{"files", "files of the volume", measureFiles},
	} {
		if *only != "" && *only != m.name {
			continue
		}
		curves := m.measure(n)
		table(os.Stdout, m.x, curves)
		f, err := os.OpenFile(filepath.Join(*pictures, "scale-"+m.name+".svg"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
		must(err)
		_, err = io.WriteString(f, draw(m.x, curves))
		must(err)
		must(f.Close())
	}
	n.kill()
	must(exec.Command("rm", "-rf", "--one-file-system", dir).Run())
}
