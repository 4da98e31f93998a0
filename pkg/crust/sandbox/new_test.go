package sandbox

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// counting is a backend whose sandboxes count how many of them are open.
type counting struct {
	Backend
	open atomic.Int32
}

type counted struct {
	Sandbox
	b *counting
}

func (*counting) Kind() string      { return "counting" }
func (*counting) Close() error      { return nil }
func (*counting) Forget(Spec) error { return errors.New("this one cannot be forgotten") }
func (b *counting) Open(context.Context, Opening) (Sandbox, error) {
	b.open.Add(1)
	return counted{b: b}, nil
}
func (s counted) Detach() { s.b.open.Add(-1) }

// What one sandbox left before a reboot, and nobody can remove, is no reason to serve no other.
func TestNewStartsBesideWhatCannotBeRemoved(t *testing.T) {
	boot, err := mounter.BootID()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := newStore(filepath.Join(dir, "sandboxes"))
	if err := os.MkdirAll(s.Path, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, r := range []sandboxRecord{
		{Kind: "counting", Spec: Spec{ID: "a", reach: "{}"}, BootID: boot},
		{Kind: "counting", Spec: Spec{ID: "b", reach: "{}"}, BootID: "an earlier one"},
		{Kind: "counting", Spec: Spec{ID: "c", reach: "{}"}, BootID: boot},
	} {
		if err := s.put(r); err != nil {
			t.Fatal(err)
		}
	}
	b := &counting{}
	for range 2 {
		m, err := New(t.Context(), Config{StateDir: dir, KubeletDir: "/var/lib/kubelet", Backend: b})
		if err != nil {
			t.Fatal(err)
		}
		if n := b.open.Load(); n != 2 {
			t.Errorf("%d sandboxes are open", n)
		}
		m.Stop()
		if n := b.open.Load(); n != 0 {
			t.Errorf("%d sandboxes are open after the end", n)
		}
	}
	if left, _, err := s.load(); err != nil || len(left) != 3 {
		t.Errorf("nobody will try again: %v, %v", left, err)
	}
}

// The kind of sandboxes that a reboot has ended does not matter: a node may come back with another
// backend.
func TestNewForgetsTheSandboxesOfAnEarlierBoot(t *testing.T) {
	dir := t.TempDir()
	s := newStore(filepath.Join(dir, "sandboxes"))
	if err := os.MkdirAll(s.Path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.put(sandboxRecord{Kind: "another", Spec: Spec{ID: "a", reach: "{}"}, BootID: "an earlier one"}); err != nil {
		t.Fatal(err)
	}
	m, err := New(t.Context(), Config{StateDir: dir, KubeletDir: "/var/lib/kubelet", Backend: &awkward{}})
	if err != nil {
		t.Fatal(err)
	}
	m.Stop()
	if left, _, err := s.load(); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// C11: a Config without its parts is refused, and nothing is made in the current directory.
func TestC11_AConfigWantsItsParts(t *testing.T) {
	whole := Config{StateDir: t.TempDir(), KubeletDir: "/var/lib/kubelet", Backend: &counting{}}
	for part, remove := range map[string]func(*Config){
		"StateDir": func(c *Config) { c.StateDir = "" }, "KubeletDir": func(c *Config) { c.KubeletDir = "" },
		"Backend": func(c *Config) { c.Backend = nil },
	} {
		c := whole
		remove(&c)
		if _, err := New(t.Context(), c); !fault.Is(err, fault.Invalid) {
			t.Errorf("without %s: %v", part, err)
		}
	}
}
