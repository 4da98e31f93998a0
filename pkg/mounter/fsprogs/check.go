package fsprogs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/confine"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Outcome is what a file system check ended with.
type Outcome int

// The three outcomes.
const (
	Clean Outcome = iota
	Repaired
	NeedsHuman // nothing was written to the device
)

func (o Outcome) String() string { return outcomes[o] }

var outcomes = []string{"clean", "repaired", "needs-human"}

// Outcomes are the names of all.
func Outcomes() []string { return slices.Clone(outcomes) }

// Check checks the file system on an unmounted device. On ext2/3/4 it repairs
// what is safe without asking (e2fsck -p). It only looks at xfs and btrfs: the
// kernel replays their journals, and their repair programs are for people. The
// text is the program's. Nothing is written when the outcome is NeedsHuman.
func (p *Programs) Check(ctx context.Context, device, name string) (Outcome, string, error) {
	t := fstype.Of(name)
	if len(t.Check) == 0 {
		return NeedsHuman, "", fault.New(fault.State, "no program is known that checks %s", name)
	}
	if t.Preen {
		return p.preen(ctx, t, device)
	}
	out, code, err := p.run(ctx, t.Check, device)
	if err != nil || code != 0 {
		return NeedsHuman, out, err
	}
	return Clean, out, nil
}

// preen repairs an ext2/3/4 with e2fsck -p. That program writes before it finds
// out that it must give up (it replays the journal, repairs what it can, and
// marks the superblock). So the repair is first made on a copy of the metadata,
// which tells how it will end.
func (p *Programs) preen(ctx context.Context, t fstype.Type, device string, flags ...string) (Outcome, string, error) {
	argv := append(slices.Clone(t.Check), flags...)
	if outcome, out, err := p.rehearse(ctx, argv, device); err != nil || outcome == NeedsHuman {
		return NeedsHuman, out, err
	}
	out, code, err := p.run(ctx, argv, device)
	if err != nil {
		return NeedsHuman, out, err
	}
	return preened(device, out, code)
}

// preened reads the exit status of e2fsck(8).
func preened(device, out string, code int) (Outcome, string, error) {
	const repaired, rebootNeeded, uncorrected = 1, 2, 4
	switch {
	case code == 0:
		return Clean, out, nil
	case code&^(repaired|rebootNeeded) == 0:
		return Repaired, out, nil
	case code&uncorrected != 0:
		return NeedsHuman, out, nil
	default:
		return NeedsHuman, out, fmt.Errorf("e2fsck -p %s: exit status %d: %s", device, code, out)
	}
}

// rehearse runs e2fsck on a sparse copy of the device's metadata (e2image -r):
// superblocks, bitmaps, inodes, directories and the journal, no file's data,
// which e2fsck does not read.
func (p *Programs) rehearse(ctx context.Context, argv []string, device string) (_ Outcome, _ string, err error) {
	f, err := os.CreateTemp(p.Scratch, copyPrefix)
	if err != nil {
		return NeedsHuman, "", err
	}
	defer f.Close()
	// The file keeps its name until then: a file without a name cannot be mounted where
	// the program sees it.
	defer func() { err = errors.Join(err, os.Remove(f.Name())) }()
	out, code, err := p.runOnCopy(ctx, f, device, "e2image", "-r", confine.Inside(device), confine.CopyPath)
	if err != nil {
		return NeedsHuman, out, err
	}
	if code != 0 && strings.Contains(strings.ToLower(out), linux.ENOSPC.Error()) {
		return NeedsHuman, out, fault.New(fault.NoSpace, "%s is damaged, and its repair is tried on a copy of its metadata first, for which "+
			"there is no room in %s: %s", device, p.scratch(), out)
	}
	if code != 0 {
		return NeedsHuman, "its metadata cannot be read: " + out, nil
	}
	out, code, err = p.runOnCopy(ctx, f, "", append(slices.Clone(argv), confine.CopyPath)...)
	out = strings.ReplaceAll(out, confine.CopyPath, device)
	if err != nil {
		return NeedsHuman, out, err
	}
	return preened(device, out, code)
}

const copyPrefix = "check-"

// Clear removes the copies that an earlier process left in Scratch.
func (p *Programs) Clear() error {
	if p.Scratch == "" {
		return nil // others have files there
	}
	left, err := filepath.Glob(filepath.Join(p.Scratch, copyPrefix+"*"))
	for _, name := range left {
		err = errors.Join(err, os.Remove(name))
	}
	return err
}

func (p *Programs) scratch() string {
	if p.Scratch == "" {
		return os.TempDir()
	}
	return p.Scratch
}

// runOnCopy runs a program that has the file as confine.CopyPath, and ends with
// this process: nobody misses a copy.
func (p *Programs) runOnCopy(ctx context.Context, f *os.File, device string, argv ...string) (string, int, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = linux.KilledWithThread()
	return p.start(ctx, cmd, confine.Limits{Device: device, Copy: f})
}

// CheckCommand is the command that a person would look at a damaged, unmounted
// file system with; it changes nothing.
func CheckCommand(name, device string) string {
	look := fstype.Of(name).Look
	if len(look) == 0 {
		look = []string{"fsck", "-n"} // finds the program
	}
	return strings.Join(look, " ") + " " + device
}
