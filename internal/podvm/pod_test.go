package podvm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

func self(t *testing.T) process {
	t.Helper()
	p, err := processOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func made(t *testing.T, pods Pods, id string) *Pod {
	t.Helper()
	p := &Pod{ID: id, Pause: self(t)}
	if err := pods.make(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.remove(); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		if _, err := os.Stat(p.dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", p.dir, err)
		}
	})
	return p
}

// No two QEMUs run as the same user, whoever makes their pods at the same moment.
func TestC24_EachPodsQEMUHasAUserOfItsOwn(t *testing.T) {
	pods := Pods{t.TempDir()}
	lock, err := os.OpenFile(filepath.Join(pods.Dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		err = linux.Flock(lock)
	}
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(200*time.Millisecond, func() { lock.Close() }) // another pod is being made just now
	var all sync.WaitGroup
	made := make([]*Pod, 6)
	for i := range made {
		made[i] = &Pod{ID: fmt.Sprintf("pod-%d", i), Pause: self(t)}
		all.Go(func() {
			if err := pods.make(t.Context(), made[i]); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	users := map[uint32]bool{}
	for _, p := range made {
		users[p.UID] = true
		if err := p.remove(); err != nil {
			t.Error(err)
		}
	}
	if len(users) != len(made) || users[0] {
		t.Errorf("%v", users)
	}
}

// What a container has read-only is so on the host, too: the guest's kernel is the tenant's.
func TestC24_WhatIsSharedReadOnly(t *testing.T) {
	p := made(t, Pods{t.TempDir()}, "pod")
	source := t.TempDir()
	if err := os.WriteFile(filepath.Join(source, "f"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(p.at("shared"), "one")
	if err := p.add("one"); err != nil {
		t.Fatal(err)
	}
	for name, readOnly := range map[string]bool{"1": true, "2": false} {
		if err := p.share("one", name, source, access{readOnly: readOnly}); err != nil {
			t.Fatal(err)
		}
		err := os.WriteFile(filepath.Join(at, name, name), nil, 0o644)
		if readOnly != errors.Is(err, linux.EROFS) || !readOnly && err != nil {
			t.Errorf("read-only %v: %v", readOnly, err)
		}
	}
	if err := p.share("one", "3", filepath.Join(source, "f"), access{readOnly: true}); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(at, "3")); err != nil || string(b) != "text" {
		t.Errorf("%q %v", b, err)
	}
	if err := p.share("one", "4", "/dev/loop-control", access{}); err != nil { // a character device is a file of virtiofs
		t.Error(err)
	}
	if pod, err := (Pods{filepath.Dir(p.dir)}).of("one"); err != nil || pod == nil || pod.ID != "pod" {
		t.Errorf("whose container it is: %v %v", pod, err)
	}
	if err := p.drop("one"); err != nil {
		t.Fatal(err)
	}
	// Nothing of the source went with it.
	if b, err := os.ReadFile(filepath.Join(source, "f")); err != nil || string(b) != "text" {
		t.Errorf("the source: %q %v", b, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), at) {
		t.Errorf("still mounted: %v", err)
	}
}

func TestAnIDIsNoPath(t *testing.T) {
	pods := Pods{t.TempDir()}
	for _, id := range []string{"", ".", "..", "a/b", "../x", "-x", strings.Repeat("a", 200)} {
		if _, err := pods.find(id); err == nil || errors.Is(err, os.ErrNotExist) {
			t.Errorf("%q: %v", id, err)
		}
		if p, err := pods.of(id); p != nil || err != nil {
			t.Errorf("%q: %v %v", id, p, err)
		}
	}
}

// The logs of the last pods that had to end are kept, and no more.
func TestLogsOfPodsThatHadToEnd(t *testing.T) {
	pods := Pods{t.TempDir()}
	end := func(id, log string) {
		t.Helper()
		p := made(t, pods, id)
		if err := os.WriteFile(p.at(monitorLog), []byte(log), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p.at(consoleLog), []byte("\x1b[2J of the guest\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(p.keepLog(), p.remove()); err != nil {
			t.Fatal(err)
		}
	}
	end("well", "booted\n")
	for i := range mostEnded + 2 {
		end(fmt.Sprintf("pod-%d", i), "booted\n"+theEnd+" QEMU has ended\n")
	}
	kept, err := os.ReadDir(filepath.Join(pods.Dir, ".ended"))
	if err != nil || len(kept) != mostEnded {
		t.Errorf("%d are kept: %v", len(kept), err)
	}
	if _, err := os.Stat(filepath.Join(pods.Dir, ".ended", fmt.Sprintf("pod-%d.log", mostEnded+1))); err != nil {
		t.Error(err)
	}
	b, err := os.ReadFile(filepath.Join(pods.Dir, ".ended", fmt.Sprintf("pod-%d.log", mostEnded)))
	if err != nil || !strings.Contains(string(b), `\x1b[2J of the guest`+"\n") {
		t.Errorf("what the guest wrote is not made plain: %q %v", b, err)
	}
	if all, err := pods.sweep(t.Context()); len(all) != 0 || err != nil {
		t.Errorf("%v %v", all, err)
	}
}

// A guest that answers nothing does not collect processes on the node. The place of a call that has ended is free.
func TestC20_FewCommandsWaitForAGuest(t *testing.T) {
	p := &Pod{ID: "p", dir: t.TempDir()}
	var held []*os.File
	for range mostTurns {
		f, err := p.turn()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		held = append(held, f)
	}
	if f, err := p.turn(); err == nil || !strings.Contains(err.Error(), "32 commands wait") {
		t.Errorf("one more: %v %v", f, err)
	}
	held[7].Close()
	f, err := p.turn()
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}
