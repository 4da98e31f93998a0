package volume_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

// dying is a Source and a Formatter whose process dies at a chosen step. The steps before it are done.
type dying struct {
	volume.Pool
	programs *fsprogs.Programs
	at       string
	before   func() // is called before mkfs
	formats  int
}

var errDied = errors.New("died")

func (d *dying) SetFacts(id string, facts volume.Facts) error {
	if d.at == "before mkfs is on record" || d.at == "after mkfs" && facts.Formatted != "" {
		return errDied
	}
	return d.Pool.SetFacts(id, facts)
}

func (d *dying) Format(ctx context.Context, blank superblock.BlankDevice, fstype string, thick bool) error {
	d.formats++
	if d.before != nil {
		d.before()
	}
	switch d.at {
	case "before mkfs":
		return errDied
	case "in mkfs": // its first blocks are there, and the superblock is not
		f, err := os.OpenFile(blank.Path(), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteAt([]byte("an inode table"), 1<<20)
		return errors.Join(err, f.Sync(), errDied)
	}
	return d.programs.Format(ctx, blank, fstype, thick)
}

// attached is a new volume of a pool of its own, with its device.
func attached(t *testing.T) (*dying, string, volume.Attachment) {
	t.Helper()
	dir := t.TempDir()
	pool, err := looppool.Open(looppool.Options{Name: "pool", Dir: dir, NodesDir: dir})
	ok(t, err)
	t.Cleanup(func() { pool.Close() })
	v, err := pool.Create(t.Context(), volume.Spec{Name: "v", Size: 128 << 20, FSType: "ext4"}, &volume.Progress{})
	ok(t, err)
	a, err := pool.Attach(t.Context(), v.ID)
	ok(t, err)
	t.Cleanup(func() { ok(t, pool.Detach(context.Background(), v.ID)) })
	return &dying{Pool: pool, programs: fsprogs.New(nil)}, v.ID, a
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func blkid(t *testing.T, device string) string {
	t.Helper()
	out, err := exec.Command("blkid", "-p", "-s", "TYPE", "-s", "LABEL", "-o", "value", device).Output()
	if code := new(exec.ExitError); err != nil && (!errors.As(err, &code) || code.ExitCode() != 2) { // 2: nothing was found
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func write(t *testing.T, device, text string, at int64) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	ok(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte(text), at)
	ok(t, errors.Join(err, f.Sync()))
}

// D02, D06: a volume is formatted once, wherever a process that formatted it has died.
func TestD02_D06_EnsureFilesystemFormatsOnce(t *testing.T) {
	for _, step := range []string{"nowhere", "before mkfs is on record", "before mkfs", "in mkfs", "after mkfs"} {
		t.Run(step, func(t *testing.T) {
			d, id, a := attached(t)
			ensure := func() error {
				return volume.EnsureFilesystem(t.Context(), d, id, a.Device, "ext4", d, &volume.Progress{})
			}
			if d.at = step; step != "nowhere" {
				if err := ensure(); !errors.Is(err, errDied) {
					t.Fatal(err)
				}
			}
			before := d.formats
			d.at = ""
			ok(t, ensure())
			if got := blkid(t, a.Device.Path); got != "ext4" {
				t.Errorf("the device holds %q", got)
			}
			if again := d.formats - before; again > 1 || step == "after mkfs" && again > 0 {
				t.Errorf("formatted %d times more", again)
			}
			ok(t, exec.Command("tune2fs", "-L", "mine", a.Device.Path).Run())
			ok(t, ensure())
			if got := blkid(t, a.Device.Path); !strings.Contains(got, "mine") {
				t.Errorf("formatted again: %q", got)
			}
			v, err := d.Get(id)
			ok(t, err)
			if v.Facts.Formatted != "ext4" || v.Facts.Formatting != nil {
				t.Errorf("%+v", v.Facts)
			}
		})
	}
}

// D01: what may be somebody's is not formatted, and its bytes stay.
func TestD01_EnsureFilesystemLeavesDataAlone(t *testing.T) {
	begun := func(t *testing.T, d *dying, id string, a volume.Attachment) {
		d.at = "before mkfs"
		if err := volume.EnsureFilesystem(t.Context(), d, id, a.Device, "ext4", d, &volume.Progress{}); !errors.Is(err, errDied) {
			t.Fatal(err)
		}
		d.at, d.formats = "", 0
	}
	for name, c := range map[string]struct {
		before func(t *testing.T, d *dying, id string, a volume.Attachment)
		want   fault.Kind
	}{
		"another file system was asked for then": {func(t *testing.T, d *dying, id string, _ volume.Attachment) {
			ok(t, d.SetFacts(id, volume.Facts{Formatted: "xfs"}))
		}, fault.State},
		"given out raw": {func(t *testing.T, d *dying, id string, _ volume.Attachment) {
			ok(t, d.SetFacts(id, volume.Facts{GivenRaw: true}))
		}, fault.State},
		"another file system in the place of a begun one": {func(t *testing.T, d *dying, id string, a volume.Attachment) {
			begun(t, d, id, a)
			ok(t, exec.Command("mkfs.btrfs", "-q", "-f", a.Device.Path).Run())
		}, fault.State},
		"given out raw while formatting was on record": {func(t *testing.T, d *dying, id string, a volume.Attachment) {
			begun(t, d, id, a)
			v, err := d.Get(id)
			ok(t, err)
			v.Facts.GivenRaw = true
			ok(t, d.SetFacts(id, v.Facts))
			write(t, a.Device.Path, "a tenant's", 1<<20)
		}, fault.State},
		"a mkfs that still runs": {func(t *testing.T, d *dying, id string, a volume.Attachment) {
			begun(t, d, id, a)
			f, err := os.OpenFile(a.Device.Path, os.O_RDWR|os.O_EXCL, 0)
			ok(t, err)
			t.Cleanup(func() { f.Close() })
		}, fault.Busy},
	} {
		t.Run(name, func(t *testing.T) {
			d, id, a := attached(t)
			c.before(t, d, id, a)
			const precious = "precious"
			write(t, a.Device.Path, precious, 8<<20)
			err := volume.EnsureFilesystem(t.Context(), d, id, a.Device, "ext4", d, &volume.Progress{})
			if !fault.Is(err, c.want) || !strings.Contains(err.Error(), id) && !strings.Contains(err.Error(), a.Device.Path) {
				t.Errorf("%v", err)
			}
			got := make([]byte, len(precious))
			f, err := os.Open(a.Device.Path)
			ok(t, err)
			defer f.Close()
			_, err = f.ReadAt(got, 8<<20)
			ok(t, err)
			if d.formats > 0 || string(got) != precious {
				t.Errorf("formatted %d times; %q is left", d.formats, got)
			}
		})
	}
}

// foreign is a Source of devices that somebody else made. Embedding a Source, it has no other method of a pool.
type foreign struct{ volume.Source }

// prover is a foreign Source that proves devices blank itself.
type prover struct {
	volume.Source
	device string
	asked  int
}

func (p *prover) ProveBlank(
	ctx context.Context, _ string, _ *volume.Progress,
) (r superblock.Result, b superblock.BlankDevice, err error) {
	p.asked++
	return superblock.ProveBlank(ctx, p.device, superblock.Reading{})
}

// D01: after an interrupted mkfs, a path that somebody else assigned may lead to another disk.
func TestD01_EnsureFilesystemDoesNotResumeOnAnotherDisk(t *testing.T) {
	d, id, a := attached(t)
	p := &prover{Source: d, device: a.Device.Path}
	ensure := func() error { return volume.EnsureFilesystem(t.Context(), p, id, a.Device, "ext4", d, nil) }
	_, blank, err := volume.ProveBlank(t.Context(), d, id, a.Device, nil)
	ok(t, err)
	intent := blank.Intent("ext4")
	ok(t, d.SetFacts(id, volume.Facts{Formatting: &intent}))
	write(t, a.Device.Path, "precious", 0)
	if err := ensure(); !fault.Is(err, fault.State) || d.formats > 0 || p.asked > 0 {
		t.Errorf("%v; formatted %d times, asked %d times", err, d.formats, p.asked)
	}
	write(t, a.Device.Path, strings.Repeat("\x00", 8), 0)
	write(t, a.Device.Path, "precious", unseen)
	if err := ensure(); !fault.Is(err, fault.State) || d.formats > 0 || p.asked != 1 {
		t.Errorf("%v; formatted %d times, asked %d times", err, d.formats, p.asked)
	}
	write(t, a.Device.Path, strings.Repeat("\x00", 8), unseen)
	ok(t, ensure())
	if got := blkid(t, a.Device.Path); got != "ext4" {
		t.Errorf("the device holds %q", got)
	}
}

// unseen is an offset that a probe of the test's device does not read.
const unseen = 37<<20 + 12345

// D01: a probe is no proof for a device that no pool made, whatever methods its Source has.
func TestD01_AForeignDeviceIsReadAsAWhole(t *testing.T) {
	d, id, a := attached(t)
	write(t, a.Device.Path, "precious", unseen)
	if found, err := superblock.ProbeDevice(a.Device.Path); err != nil || found.Content != superblock.Blank {
		t.Fatalf("a probe sees it: %v, %v", found, err)
	}
	err := volume.EnsureFilesystem(t.Context(), foreign{d}, id, a.Device, "ext4", d, nil)
	if !fault.Is(err, fault.State) || d.formats > 0 {
		t.Errorf("%v; formatted %d times", err, d.formats)
	}
}

// D01: what was written after the proof is not taken for an interrupted mkfs, at the next attempt either.
func TestD01_WhatWasWrittenAfterTheProofStays(t *testing.T) {
	for _, died := range []bool{false, true} { // an earlier attempt, before mkfs had written anything
		t.Run(fmt.Sprintf("died=%t", died), func(t *testing.T) {
			d, id, a := attached(t)
			ensure := func() error { return volume.EnsureFilesystem(t.Context(), d, id, a.Device, "ext4", d, nil) }
			if died {
				d.at = "before mkfs"
				if err := ensure(); !errors.Is(err, errDied) {
					t.Fatal(err)
				}
				d.at = ""
			}
			d.before = func() { write(t, a.Device.Path, "precious", 0) }
			for range 3 {
				if err := ensure(); !fault.Is(err, fault.State) {
					t.Error(err)
				}
				got := make([]byte, 8)
				f, err := os.Open(a.Device.Path)
				ok(t, err)
				_, err = f.ReadAt(got, 0)
				ok(t, errors.Join(err, f.Close()))
				if v, err := d.Get(id); err != nil || v.Facts.Formatting != nil || string(got) != "precious" {
					t.Fatalf("%v, %+v, %q", err, v.Facts, got)
				}
			}
		})
	}
}
