package kata_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/pkg/crust/sandbox/kata"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// C12, C13, C16, C18: the life of a pod's volume, with each file system, in both worlds: what Kata is told, and what is on the device.
func TestC12_C16_KataAPodsVolume(t *testing.T) {
	for _, fs := range fileSystems(t) {
		t.Run(fs, func(t *testing.T) {
			w := newWorld(t, kata.Go)
			w.fs = fs
			id, group := "pod-"+w.fs, uint32(4321)
			w.sandbox(id)
			d, _ := w.disk(w.fs)
			r := w.request(id, d, "noatime")
			r.FsgroupGid, r.FsgroupPolicy = &group, "Always"
			if pending, err := w.publish(r); !pending || err != nil {
				t.Fatalf("pending %v, %v", pending, err)
			}
			if !w.busy(d) {
				t.Error("nobody holds the device")
			}
			info := filepath.Join(w.place(r.GetHostTargetPath()), "mountInfo.json")
			text, err := os.ReadFile(info)
			check(t, err)
			var got map[string]any
			check(t, json.Unmarshal(text, &got))
			options := append([]any{"noatime"}, optionsOf(w.fs)...)
			if want := map[string]any{"volume-type": "directvol", "device": d.Path, "fstype": w.fs, "options": options,
				"metadata": map[string]any{"fsGroup": "4321", "fsGroupChangePolicy": "Always"}}; fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("Kata is told %s", text)
			}
			for path, mode := range map[string]os.FileMode{info: 0o600, filepath.Dir(info): 0o700 | os.ModeDir} {
				if st, err := os.Stat(path); err != nil || st.Mode() != mode {
					t.Errorf("%s: %v %v", path, st.Mode(), err)
				}
			}
			of := &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: id, HostVolumeId: d.Path}
			_, err = w.server.RuntimeGetVolumeStats(t.Context(), of)
			wants(t, "statistics before a container starts", err, fault.Unavailable, "when a container of the sandbox starts")

			root, err := w.create(id, r.GetHostTargetPath())
			check(t, err)
			check(t, os.WriteFile(root+"/f", []byte("from the pod"), 0o644))
			if pending, err := w.publish(r); pending || err != nil {
				t.Errorf("a container has started: pending %v, %v", pending, err)
			}
			stats, err := w.server.RuntimeGetVolumeStats(t.Context(), of)
			check(t, err)
			u, err := w.guests[id].mounts[d.Path].Usage()
			check(t, err)
			if b := stats.GetUsage()[0]; b.GetTotal() != u.TotalBytes || b.GetAvailable() != u.AvailableBytes || b.GetTotal() == 0 {
				t.Errorf("statistics %v, and the guest has %+v", b, u)
			}
			if got := w.listed(id).GetVolumes()[0].GetState(); got != "published" {
				t.Errorf("listed as %s", got)
			}
			err = w.server.Unpublish(t.Context(), id, d.Path)
			wants(t, "a volume in use", err, fault.State, "end the pod")
			if again, err := w.create(id, r.GetHostTargetPath()); err != nil {
				t.Errorf("a second container: %v", err)
			} else if b, err := os.ReadFile(again + "/f"); string(b) != "from the pod" {
				t.Errorf("a second container reads %q, %v", b, err)
			}

			w.end(id)
			w.gone(id)
			if w.busy(d) {
				t.Error("the sandbox has ended, and the device is held")
			}
			if left, err := os.ReadDir(w.volumes); len(left) > 0 || err != nil {
				t.Errorf("%v are left, %v", left, err)
			}
			w.has(d, w.fs, "f", "from the pod")
		})
	}
}

func optionsOf(fs string) (list []any) {
	if o := fstype.Of(fs).Copy; o != "" {
		list = append(list, o)
	}
	return list
}

// R05: a read-only volume is so in Kata's record, and two pods can read it.
func TestR05_KataReadOnly(t *testing.T) {
	w := newWorld(t, kata.Go)
	d, _ := w.disk(w.fs)
	for _, id := range []string{"one", "two"} {
		w.sandbox(id)
		r, group := w.request(id, d, "ro"), uint32(7)
		r.FsgroupGid = &group // Kata's agent would fail with that
		_, err := w.publish(r)
		check(t, err)
		root, err := w.create(id, r.GetHostTargetPath())
		check(t, err)
		if err := os.WriteFile(root+"/f", nil, 0o600); err == nil {
			t.Error("it can be written to")
		}
	}
	w.sandbox("three")
	_, err := w.publish(w.request("three", d))
	wants(t, "a writer beside readers", err, fault.State, "is in use by sandbox")
	w.end("one")
	w.gone("one")
	if !w.busy(d) {
		t.Error("one reader has ended, and nobody holds the device of the other")
	}
}

// C12: what is pending is taken back, unless Kata has begun with it.
func TestC12_KataTakesBackWhatIsPending(t *testing.T) {
	w := newWorld(t, kata.Go)
	d, r, _ := w.pod("pod")
	end := opened(t, d.Path, 0) // by the hypervisor, which has read the record
	err := w.server.Unpublish(t.Context(), "pod", d.Path)
	wants(t, "a device that is open", err, fault.State, "a process has it open")
	if strings.Contains(fmt.Sprint(err), "sleep") {
		t.Errorf("readers of an event see other processes: %v", err)
	}
	if !w.busy(d) {
		t.Error("nobody holds the device that Kata has opened")
	}
	if _, err := w.create("pod", r.GetHostTargetPath()); err != nil {
		t.Errorf("the container that was starting does not start: %v", err)
	}
	end()

	e, r, _ := w.pod("other")
	check(t, w.server.Unpublish(t.Context(), "other", e.Path))
	if w.busy(e) {
		t.Error("it was taken back, and the device is held")
	}
	if _, err := w.create("other", r.GetHostTargetPath()); !errors.Is(err, errShared) {
		t.Errorf("it was taken back, and Kata has %v", err)
	}
}

// C12: Kata reads the record in the very moment in which it is removed. The volume stays, and so does the record, for the pod's other
// containers.
func TestC12_KataIsQuickerThanUnpublish(t *testing.T) {
	w := newWorld(t, kata.Go)
	w.sandbox("pod")
	d, _ := w.disk(w.fs)
	r := w.request("pod", d)
	info := filepath.Join(w.place(r.GetHostTargetPath()), "mountInfo.json")
	for range 100 {
		_, err := w.publish(r)
		check(t, err)
		before, err := os.ReadFile(info)
		check(t, err)
		noted := make(chan error)
		go func() {
			for {
				if _, err := os.Lstat(info); err != nil {
					noted <- os.WriteFile(filepath.Join(filepath.Dir(info), "pod"), nil, 0o600)
					return
				}
			}
		}()
		err = w.server.Unpublish(t.Context(), "pod", d.Path)
		nerr := <-noted
		if err == nil {
			check(t, os.RemoveAll(filepath.Dir(info)))
			continue // it was too late
		}
		check(t, nerr)
		wants(t, "a container that starts", err, fault.State, "a container was started with it")
		if after, err := os.ReadFile(info); string(after) != string(before) || err != nil {
			t.Errorf("the record is %q now, %v", after, err)
		}
		if !w.busy(d) {
			t.Error("nobody holds the device")
		}
		return
	}
	t.Error("it was always too late")
}

// opened has another process open a device, until end is called.
func opened(t *testing.T, path string, flags int) (end func()) {
	t.Helper()
	c := exec.Command("sleep", "1000000")
	f, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
	check(t, err)
	c.ExtraFiles = []*os.File{f}
	check(t, c.Start())
	check(t, f.Close())
	end = sync.OnceFunc(func() {
		check(t, c.Process.Kill())
		_ = c.Wait() // it was killed
	})
	t.Cleanup(end)
	return end
}

// C18: a server that starts again holds the devices again, unless the sandbox has ended meanwhile.
func TestC18_KataAServerThatStartsAgain(t *testing.T) {
	w := newWorld(t, kata.Go)
	devices := map[string]mounter.Device{}
	for _, id := range []string{"lives", "ended", "robbed"} {
		d, r, _ := w.pod(id)
		devices[id] = d
		if _, err := w.create(id, r.GetHostTargetPath()); err != nil {
			t.Fatal(err)
		}
	}
	w.server.Stop()
	w.end("ended")
	robber, err := os.OpenFile(devices["robbed"].Path, os.O_RDONLY|os.O_EXCL, 0)
	check(t, err)
	w.start()
	w.gone("ended")
	if w.busy(devices["ended"]) || !w.busy(devices["lives"]) {
		t.Errorf("held: of the one that ended %v, of the one that lives %v", w.busy(devices["ended"]), w.busy(devices["lives"]))
	}
	_, err = w.publish(w.request("robbed", devices["robbed"]))
	wants(t, "a device that somebody else took", err, fault.State, "cannot be reached")
	check(t, robber.Close())
	for end := time.Now().Add(time.Minute); !w.busy(devices["robbed"]); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody holds it again")
		}
	}
}
