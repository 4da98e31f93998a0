package podvm

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
)

func ended(t *testing.T) process {
	t.Helper()
	c := exec.Command("sleep", "100")
	c.SysProcAttr = linux.KilledWithThread()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := processOf(c.Process.Pid)
	if err != nil || !p.runs() || !p.same() {
		t.Fatal(p, err)
	}
	p.kill()
	if err := c.Wait(); err == nil || p.runs() || p.same() {
		t.Fatal(p, err)
	}
	return p
}

// A call that should have removed a pod may have been interrupted at any point. The next pod's removes the rest.
func TestC19_WhatIsLeftOfPodsGoesWithTheNext(t *testing.T) {
	pods := Pods{t.TempDir()}
	source := t.TempDir()
	lives := made(t, pods, "lives")
	for _, p := range []*Pod{made(t, pods, "ended"), made(t, pods, "half-made")} {
		if err := errors.Join(p.add("one"), p.share("one", "1", source, access{})); err != nil {
			t.Fatal(err)
		}
		p.Pause = ended(t)
		if err := writeJSON(p.at("pod.json"), p); err != nil {
			t.Fatal(err)
		}
		if p.ID == "half-made" {
			if err := os.Remove(p.at("pod.json")); err != nil {
				t.Fatal(err)
			}
		}
	}
	next := made(t, pods, "next")
	left, err := entries(pods.Dir)
	if err != nil || len(left) != 3 { // and the lock
		t.Errorf("%q %v", left, err)
	}
	if next.UID == lives.UID {
		t.Errorf("both have user %d", next.UID)
	}
	for _, p := range []*Pod{lives, next} {
		if _, err := pods.find(p.ID); err != nil {
			t.Error(err)
		}
	}
}

// A pod that another version of crust-oci has made may run. It keeps its user, and other pods can be made.
func TestC19_C24_APodOfAnotherVersionIsLeftAlone(t *testing.T) {
	pods := Pods{t.TempDir()}
	other := made(t, pods, "other")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(other.at("pod.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"pause":17,"uid":` + strconv.FormatUint(uint64(other.UID), 10) + `}`)
	if next := made(t, pods, "next"); next.UID == other.UID {
		t.Errorf("both have user %d", next.UID)
	}
	write(`{"uid":`)
	err := pods.make(t.Context(), &Pod{ID: "third", Pause: self(t)})
	if err == nil || !strings.Contains(err.Error(), "drain the node, and remove "+other.dir) {
		t.Errorf("a pod whose user is not known: %v", err)
	}
	if _, err := os.Lstat(other.at("tree")); err != nil {
		t.Error(err)
	}
}

// A second creation with the same id is refused, and takes nothing from the pod that runs.
func TestC19_APodIsNotMadeTwice(t *testing.T) {
	pods := Pods{t.TempDir()}
	p := made(t, pods, "pod")
	if err := pods.make(t.Context(), &Pod{ID: "pod", Pause: self(t)}); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second one: %v", err)
	}
	if q, err := pods.find("pod"); err != nil || q.UID != p.UID {
		t.Errorf("the first one: %+v %v", q, err)
	}
}

// runtimeThatSays is a runtime of the host's that has a container's directory or not, and ends with a status.
func runtimeThatSays(t *testing.T, status int) *Runtime {
	t.Helper()
	file := filepath.Join(t.TempDir(), "runtime")
	if err := os.WriteFile(file, []byte("#!/bin/sh\nexit "+strconv.Itoa(status)+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return &Runtime{Host: file}
}

// containerd gives up on a deletion after ten seconds, and repeats it: by then the host's runtime may know nothing of the container.
func TestC19_ADeletionThatWasInterruptedIsFinished(t *testing.T) {
	pods := Pods{t.TempDir()}
	p := made(t, pods, "pod")
	p.Pause = ended(t)
	root := t.TempDir()
	call := Call{Args: []string{"--root", root, "delete", "one"}, Command: "delete", ID: "one", Root: root}
	container := func(stub process) {
		t.Helper()
		if err := errors.Join(p.add("one"), p.noteStub("one", stub)); err != nil {
			t.Fatal(err)
		}
	}
	there := func() bool { q, err := pods.of("one"); return q != nil && err == nil }

	// It runs, and the host's runtime refuses.
	container(self(t))
	if err := os.Mkdir(filepath.Join(root, "one"), 0o755); err != nil {
		t.Fatal(err)
	}
	var host *HostError
	if err := runtimeThatSays(t, 7).deleteContainer(t.Context(), p, call); !errors.As(err, &host) || host.Status() != 7 || !there() {
		t.Errorf("a container that runs: %v", err)
	}
	// It has ended, and the host's runtime fails with what is left of it: the caller must repeat that.
	if err := p.noteStub("one", ended(t)); err != nil {
		t.Fatal(err)
	}
	if err := runtimeThatSays(t, 1).deleteContainer(t.Context(), p, call); err == nil || there() {
		t.Errorf("a container that has ended: %v", err)
	}
	// The host's runtime knows it no more. It is not asked: containerd's shim would take its words for success of the whole.
	if err := os.Remove(filepath.Join(root, "one")); err != nil {
		t.Fatal(err)
	}
	container(ended(t))
	asked := filepath.Join(t.TempDir(), "asked")
	gone := &Runtime{Host: filepath.Join(t.TempDir(), "runtime"), Pods: pods}
	if err := os.WriteFile(gone.Host, []byte("#!/bin/sh\ntouch "+asked+"\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := gone.deleteContainer(t.Context(), p, call); err != nil || there() {
		t.Errorf("a container that the host's runtime has deleted: %v", err)
	}
	if _, err := os.Stat(asked); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the host's runtime was asked to delete what it has deleted: %v", err)
	}
	// The pod's monitor is ending: it has closed its socket, and still unmounts.
	container(ended(t))
	p.Monitor = self(t)
	if err := runtimeThatSays(t, 0).deleteContainer(t.Context(), p, call); err != nil || there() {
		t.Errorf("a container whose pod is ending: %v", err)
	}
}

func TestC24_WhoMayUseKVM(t *testing.T) {
	for _, c := range []struct {
		mode  os.FileMode
		group uint32
		ok    bool
		need  int
	}{{0o660, 104, true, 1}, {0o666, 0, true, 0}, {0o660, 0, false, 0}, {0o600, 104, false, 0}} {
		if groups, ok := groupFor(c.mode, c.group); ok != c.ok || len(groups) != c.need {
			t.Errorf("%s of group %d: %v %v", c.mode, c.group, groups, ok)
		}
	}
}

// The kernel spares a microVM as it spares its dearest container.
func TestC19_ScoresOnlyFall(t *testing.T) {
	file := filepath.Join(t.TempDir(), scoreFile)
	if err := os.WriteFile(file, []byte("900\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ score, want int }{{1000, 900}, {3, 3}, {500, 3}, {-997, -997}} {
		if err := lowerScore(file, c.score); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(file)
		if got, perr := strconv.Atoi(strings.TrimSpace(string(b))); got != c.want || err != nil || perr != nil {
			t.Errorf("with %d: %q", c.score, b)
		}
	}
}

func TestC24_MemoryOfAGuest(t *testing.T) {
	r := &Runtime{Memory: 384 << 20}
	with := func(limit string) int64 {
		return r.memory(object{"annotations": object{"io.kubernetes.cri.sandbox-memory": limit}})
	}
	if with("0") != 384<<20 || with("") != 384<<20 || with("-1") != 384<<20 {
		t.Error("without a limit")
	}
	const gib = 1 << 30
	// A kernel has 64 bytes for each page of 4096, and needs some memory itself.
	for _, limit := range []int64{gib, 64 * gib} {
		if got := with(strconv.FormatInt(limit, 10)); got < limit+min(limit/64, 96<<20)+128<<20 || got > limit+288<<20 {
			t.Errorf("%d: %d", limit, got)
		}
	}
}
