//go:build bench

package crust

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/testcrust"
)

// The rows of docs/performance.md about pods in microVMs: make bench. A row whose target is missed fails its test.

func row(t testing.TB, what, against string, base, got, target float64, unit string, atLeast bool) {
	t.Helper()
	ratio, word, met := got/base, "at most", got/base <= target
	if atLeast {
		ratio, word, met = base/got, "at least", base/got >= target
	}
	missed := ""
	if !met {
		missed = " **missed**"
		t.Errorf("%s, against %s: %.3g, and the target is %s %g", what, against, ratio, word, target)
	}
	fmt.Printf("| %s | %s | %.3g %s against %.3g %s | %.3g | %s %g%s |\n",
		what, against, got, unit, base, unit, ratio, word, target, missed)
}

func median(d []float64) float64 { slices.Sort(d); return d[len(d)/2] }

// up starts a container, and waits until its program runs.
func (r *podRuntime) up(t testing.TB, id string, s spec) *container {
	t.Helper()
	c, err := r.start(t, id, s)
	ok(t, err)
	eventually(t, testcrust.Longest(), "it runs", func() bool { return strings.Contains(c.text(t), "up\n") })
	return c
}

// endAll ends a pod and its container.
func (r *podRuntime) endAll(t testing.TB, pause, c *container) {
	r.end(t, pause)
	c.wait(t)
	r.delete(t, c.id)
}

func TestSpeed_APodWithACRUSTVolume(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	script := []string{"/bin/busybox", "sh", "-c", "echo up; busybox sleep 100000"}
	times := map[bool][]float64{}
	for i := range 5 {
		for _, with := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d %v", i, with), func(t *testing.T) {
				name := fmt.Sprintf("p%d-%v", i, with)
				p := s.pod(name, s.Volume(name, "ext4"))
				config := r.spec(t, name, "container", script...)
				begin := time.Now()
				if with {
					ok(t, s.nodePublish(p))
					config.add(mount("/data", "bind", p.target, "rbind"))
				}
				pause := r.pod(t, name, "")
				if with {
					ok(t, s.runtimePublish(p))
				}
				c := r.up(t, name+"-c", config)
				times[with] = append(times[with], time.Since(begin).Seconds())
				r.endAll(t, pause, c)
				if with {
					s.nodeUnpublish(p)
				}
				s.Delete(p.v)
			})
		}
	}
	row(t, "a pod with a CRUST volume: publish, microVM, container", "the same without a volume", median(times[false]), median(times[true]),
		1.15, "s", false)
}

func TestSpeed_ASecondContainer(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	pause := r.pod(t, "two", "")
	script := []string{"/bin/busybox", "sh", "-c", "echo up; busybox sleep 100000"}
	first := r.up(t, "first", r.spec(t, "two", "container", script...))
	var there, here []float64
	for i := range 9 {
		config := r.spec(t, "two", "container", script...)
		begin := time.Now()
		c := r.up(t, fmt.Sprint("second-", i), config)
		there = append(there, time.Since(begin).Seconds())
		ok(t, c.process.Kill())
		c.wait(t)
		r.delete(t, c.id)

		runc := &podRuntime{s: s, dir: r.dir, bin: "runc"}
		config = r.spec(t, "host", "container", script...)
		begin = time.Now()
		c = runc.up(t, fmt.Sprint("host-", i), config)
		here = append(here, time.Since(begin).Seconds())
		ok(t, c.process.Kill())
		c.wait(t)
		runc.delete(t, c.id)
	}
	r.endAll(t, pause, first)
	removeCgroups(t, "host")
	row(t, "a second container in a microVM", "runc on the host", median(here), median(there), 4, "s", false)
}

func TestSpeed_ACRUSTVolumeAgainstVirtiofs(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	program := filepath.Join(t.TempDir(), "io")
	run(t, "go", "build", "-o", program, "./io")
	v := s.Volume("v", "ext4")
	p := s.pod("io", v)
	ok(t, s.nodePublish(p))
	pause := r.pod(t, p.name, "")
	ok(t, s.runtimePublish(p))
	// On the disk of the pool.
	shared, err := os.MkdirTemp(s.Node.Dir, "shared")
	ok(t, err)
	c, err := r.start(t, "io-c", r.spec(t, p.name, "container", "/io", "/volume", "/shared").add(
		mount("/volume", "bind", p.target, "rbind"), mount("/shared", "bind", shared, "rbind"), mount("/io", "bind", program, "bind", "ro"),
		mount("/dev/shm", "tmpfs", "shm")))
	ok(t, err)
	ended := make(chan int, 1)
	go func() { st, _ := c.process.Wait(); ended <- st.ExitCode() }()
	select {
	case code := <-ended:
		if code != 0 {
			t.Fatalf("%d %s", code, c.text(t))
		}
	case <-time.After(30 * time.Minute):
		t.Fatalf("it takes too long: %s", c.text(t))
	}
	times := map[string][]float64{}
	for line := range strings.Lines(c.text(t)) {
		f := strings.Fields(line)
		ns, err := strconv.ParseFloat(f[2], 64)
		ok(t, err)
		times[f[0]+f[1]] = append(times[f[0]+f[1]], ns/1e6)
	}
	r.delete(t, c.id)
	r.end(t, pause)
	s.nodeUnpublish(p)
	s.Delete(v)
	for _, m := range []struct {
		what, text string
		target     float64
	}{
		{"untar", "untar of 10,000 files", 5}, {"fsync", "100 random writes of 4 KiB, each with fsync", 3},
		{"sequential", "64 writes of 1 MiB, and fsync", 1},
	} {
		row(t, "the CRUST volume of a pod: "+m.text, "a directory by virtiofs, speed", median(times[m.what+"/shared"]),
			median(times[m.what+"/volume"]), m.target, "ms", true)
	}
}

// resident returns the memory of a process that is not the guest's own, in MiB: proc_pid_smaps(5).
func resident(t testing.TB, pid int) (name string, mib float64) {
	t.Helper()
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	ok(t, err)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	ok(t, err)
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if f[0] == "Pss_Anon:" || f[0] == "Pss_File:" { // the guest's memory is Pss_Shmem
			kib, err := strconv.ParseFloat(f[1], 64)
			ok(t, err)
			mib += kib / 1024
		}
	}
	return strings.TrimSpace(string(comm)), mib
}

func TestSpeed_MemoryBesideTheGuests(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	r := newPodRuntime(t, s)
	network, _ := networks(t)
	pause := r.pod(t, "memory", network)
	c := r.up(t, "memory-c", r.spec(t, "memory", "container", "/bin/busybox", "sh", "-c", "echo up; busybox sleep 100000"))
	var p struct{ Monitor struct{ PID int } }
	b, err := os.ReadFile(filepath.Join(r.pods, "memory", "pod.json"))
	ok(t, err)
	ok(t, json.Unmarshal(b, &p))
	pids := []int{p.Monitor.PID}
	for i := 0; i < len(pids); i++ { // and all of its children
		out, _ := exec.Command("pgrep", "-P", strconv.Itoa(pids[i])).Output() // none: exit status 1
		for _, f := range strings.Fields(string(out)) {
			pid, err := strconv.Atoi(f)
			ok(t, err)
			pids = append(pids, pid)
		}
	}
	sum := 0.0
	var parts []string
	for _, pid := range append(pids, pause.process.Pid, c.process.Pid) {
		name, mib := resident(t, pid)
		sum += mib
		parts = append(parts, fmt.Sprintf("%s %.0f", name, mib))
	}
	row(t, "memory on the host beside the guest's, MiB: "+strings.Join(parts, ", "), "120 MiB", 120, sum, 1, "MiB", false)
	r.endAll(t, pause, c)
}
