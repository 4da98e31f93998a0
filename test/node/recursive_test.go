package node

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// withoutMountSetattr simulates a kernel before Linux 5.12.
func withoutMountSetattr(t *testing.T, n *testnode.Node) (end func()) {
	t.Helper()
	return n.Tampered("mount_setattr", "error=ENOSYS")
}

func recursiveMode(v csiclient.Volume, mode string) csiclient.Volume {
	return with(v, "", "recursiveReadOnly", mode)
}

const readOnlyPublishes = `crust_read_only_publishes_total{applied="`

func TestR02_WithoutMountSetattr(t *testing.T) {
	t.Parallel()
	n, metrics := withMetrics(t)
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	ok(t, n.Client.Stage(ctxOf(t), v))
	end := withoutMountSetattr(t, n)
	a, b, c := n.Target("a"), n.Target("b"), n.Target("c")
	refused(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), a, true), codes.FailedPrecondition,
		"recursiveReadOnly", "mount_setattr")
	ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "IfPossible"), b, true))
	wantReadOnly(t, b)
	said(t, n, "not recursively")
	// Disabled requests no recursion, so it misses none.
	ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Disabled"), c, true))
	wantReadOnly(t, c)
	end()
	wantMetric(t, metrics(), readOnlyPublishes+`plain"}`, "2")
	wantMetric(t, metrics(), readOnlyPublishes+`recursive"}`, "")
	// R04: health shows what was applied.
	if got := health(t, n, v.ID, b); got != "ReadOnlyNotRecursive" {
		t.Errorf("health: %q", got)
	}
	if got := health(t, n, v.ID, c); got != "" {
		t.Errorf("health: %q", got)
	}
	ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), a, true))
	wantMetric(t, metrics(), readOnlyPublishes+`recursive"}`, "1")
	if got := health(t, n, v.ID, a); got != "" {
		t.Errorf("health: %q", got)
	}
	down(t, n, v.ID, a, b, c)
}

// R04: the next process also knows what was applied. Enabled never succeeds with a mount that is
// not recursive.
func TestR04_WhatWasAppliedOutlivesTheDriver(t *testing.T) {
	t.Parallel()
	for _, fstype := range filesystems {
		t.Run(fstype, func(t *testing.T) {
			n := testnode.New(t, "")
			v := create(t, n, "a", csiclient.Volume{FSType: fstype})
			ok(t, n.Client.Stage(ctxOf(t), v))
			end := withoutMountSetattr(t, n)
			poor, off, full := n.Target("poor"), n.Target("off"), n.Target("full")
			ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "IfPossible"), poor, true))
			end()
			ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Disabled"), off, true))
			ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), full, true))
			look := func(when string) {
				t.Helper()
				for target, want := range map[string]string{poor: "ReadOnlyNotRecursive", off: "", full: ""} {
					if got := health(t, n, v.ID, target); got != want {
						t.Errorf("%s, the health at %s is %q, want %q", when, target, got, want)
					}
				}
				for target, mode := range map[string]string{poor: "IfPossible", off: "Disabled", full: "Enabled"} {
					ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, mode), target, true))
				}
				refused(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), poor, true), codes.FailedPrecondition, v.ID, poor,
					"recursive", "mount_setattr")
				refused(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), off, true), codes.FailedPrecondition, v.ID, off,
					"recursive", "asked for")
			}
			look("at once")
			n.Restart() // kill -9
			look("after a kill")
			n.Stop()
			n.Start()
			look("after a stop")
			// The solution that the error names.
			ok(t, n.Client.Unpublish(ctxOf(t), v.ID, poor))
			ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), poor, true))
			if got := health(t, n, v.ID, poor); got != "" {
				t.Errorf("after a new publish: %q", got)
			}
			n.Restart()
			if got := health(t, n, v.ID, poor); got != "" {
				t.Errorf("after a new publish and a restart: %q", got)
			}
			ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), poor, true))
			down(t, n, v.ID, poor, off, full)
			if left, err := os.ReadDir(filepath.Join(n.Dir, "state/published")); err != nil || len(left) > 0 {
				t.Errorf("left on record: %v %v", left, err)
			}
		})
	}
}

// R04: a record that cannot be read, or that a power loss emptied, proves nothing.
func TestR04_NothingOnRecordIsNotRecursive(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), target, true))
	records, err := filepath.Glob(filepath.Join(n.Dir, "state/published/*"))
	ok(t, err)
	if len(records) != 1 {
		t.Fatalf("%d records of one publish", len(records))
	}
	n.Kill()
	ok(t, os.Truncate(records[0], 20))
	n.Start()
	refused(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), target, true), codes.FailedPrecondition, "nothing is on record")
	n.Kill()
	ok(t, os.Remove(records[0]))
	n.Start()
	refused(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "Enabled"), target, true), codes.FailedPrecondition, "nothing is on record")
	ok(t, n.Client.Publish(ctxOf(t), recursiveMode(v, "IfPossible"), target, true))
	down(t, n, v.ID, target)
}

// The group of an id-mapped publish is on record too.
func TestIdmappedPublishOfAnotherGroupIsRefusedAfterARestart(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := with(create(t, n, "a", csiclient.Volume{FSType: "ext4"}), "", "fsGroupStrategy", "idmap")
	target := n.Target("a")
	ok(t, n.Client.Stage(ctxOf(t), v))
	ok(t, n.Client.Publish(ctxOf(t), with(v, "1000"), target, false))
	n.Restart()
	ok(t, n.Client.Publish(ctxOf(t), with(v, "1000"), target, false))
	refused(t, n.Client.Publish(ctxOf(t), with(v, "2000"), target, false), codes.AlreadyExists, "1000", "2000")
	down(t, n, v.ID, target)
}
