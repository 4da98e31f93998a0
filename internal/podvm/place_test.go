package podvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/podguest"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// Containers get what the guest mounted, the pod's own memory, or what the host shares; and start while crustd is being restarted, unless
// they need one of its volumes.
func TestC12_C24_WhatAContainersMountIs(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	if err := p.add("one"); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	plain, deferred, volumes := filepath.Join(dir, "plain"), filepath.Join(dir, "deferred"), filepath.Join(dir, "volumes", "shm")
	memory := filepath.Join(dir, "sandboxes", "pod", "shm")
	bound := filepath.Join(dir, "volume-subpaths", "pv", "c", "0")
	for _, d := range []string{plain, volumes, memory, bound} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root, err := mounter.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	target, err := root.Target(deferred)
	if err == nil {
		defer target.Close()
		err = mounter.AttachPlaceholder(target, ".", "a")
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mount", "--bind", deferred+"/a", bound).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if err := errors.Join(detach(bound), detach(deferred)); err != nil {
			t.Error(err)
		}
	})
	away := status.Error(codes.Unavailable, "crustd is away")
	const common = podguest.Shared + "/" + podguest.Common + "/"
	for name, c := range map[string]struct {
		source, destination, resolved string
		err                           error
		want, refused                 string
	}{
		"in the guest":            {source: deferred, destination: "/data", resolved: "/in/guest", want: "/in/guest"},
		"at /dev/shm":             {source: deferred, destination: "/dev/shm", resolved: "/in/guest", want: "/in/guest"},
		"the pod's memory":        {source: memory, destination: "/dev/shm", want: podguest.Memory},
		"memory of another":       {source: volumes, destination: "/dev/shm", want: common},
		"the host's":              {source: plain, destination: "/conf", want: common},
		"nobody published it":     {source: deferred, destination: "/data", refused: "was not published"},
		"nobody published a part": {source: deferred + "/a", destination: "/data", refused: "was not published"},
		"the kubelet's bind":      {source: bound, destination: "/data", refused: "crust-agent"},
		"crustd is away":          {source: plain, destination: "/conf", err: away, want: common},
		"crustd is away, memory":  {source: memory, destination: "/dev/shm", err: away, want: podguest.Memory},
		"a slot":                  {source: crust.SlotsDir + "/a", destination: "/data", resolved: "/slots/a", want: "/slots/a"},
		"a slot, crustd is away":  {source: crust.SlotsDir + "/a", destination: "/data", err: away, refused: "crustd is away"},
		"a slot, an older crustd": {source: crust.SlotsDir + "/a", destination: "/data", refused: "of this version"},
		"crustd is needed":        {source: deferred, destination: "/data", err: away, refused: "crustd is away"},
		"crustd does not know it": {source: plain, destination: "/data", err: errors.New("broken record"), refused: "broken record"},
	} {
		r := &Runtime{Resolve: func(context.Context, string, string) (string, error) { return c.resolved, c.err }}
		mount := object{"source": c.source, "destination": c.destination}
		got, err := r.place(t.Context(), p, object{"linux": object{}}, "one", dir, mount)
		if strings.HasPrefix(got, common) {
			got = common
		}
		if got != c.want || (c.refused == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	r := &Runtime{Resolve: func(context.Context, string, string) (string, error) { return "/slots/a", nil }}
	mount := object{"source": crust.SlotsDir + "/a", "options": []any{"rbind", "rprivate", "ro"}}
	for was, want := range map[string]string{"": "rslave", "private": "rslave", "rshared": "rshared", "slave": "slave"} {
		config := object{"linux": object{"rootfsPropagation": was}}
		_, err := r.place(t.Context(), p, config, "one", dir, mount)
		if err != nil || fmt.Sprint(mount["options"]) != "[ro rbind rslave]" || sub(config, "linux")["rootfsPropagation"] != want {
			t.Errorf("a container sees nothing later: %v, %v, %v", config, mount, err)
		}
	}
}

// A second creation with the same id is refused, and takes nothing from the container that runs.
func TestC19_AContainerIsNotMadeTwice(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	if err := p.add("one"); err != nil {
		t.Fatal(err)
	}
	if err := p.noteStub("one", self(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.add("one"); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second one: %v", err)
	}
	if s, err := p.stub("one"); err != nil || !s.runs() {
		t.Errorf("the first one: %+v %v", s, err)
	}
}

// A pod that cannot be looked at has not ended.
func TestC19_WhatCannotBeToldHasNotEnded(t *testing.T) {
	if (process{PID: 1 << 30, Began: "1"}).runs() { // above all numbers, proc(5) pid_max
		t.Error("a process that is not there")
	}
	if p := ended(t); p.runs() || p.same() {
		t.Error("a process that has ended")
	}
}

// A stub that cannot reach its guest ends at once. Nobody may have waited for it yet, and its start does not take as long as a boot.
func TestC19_AStubThatHasEndedIsNotWaitedFor(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	stub := exec.Command("sleep", "100")
	stub.SysProcAttr = linux.KilledWithThread()
	if err := stub.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stub.Wait() }() // "signal: killed"
	host := filepath.Join(t.TempDir(), "runtime")
	script := fmt.Sprintf("#!/bin/sh\ncase $1 in state) echo '{\"pid\": %[1]d}';; start) kill -9 %[1]d;; esac\n", stub.Process.Pid)
	if err := os.WriteFile(host, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- (&Runtime{Host: host}).start(t.Context(), p, Call{Args: []string{"start", "one"}, Command: "start", ID: "one"})
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(bootTime / 2):
		t.Error("it is still being waited for")
	}
}
