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
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// Outcome is the result of a file system check.
type Outcome int

// The outcomes.
const (
	Clean Outcome = iota
	Repaired
	NeedsHuman // nothing was written to the device
)

func (o Outcome) String() string { return outcomes[o] }

var outcomes = []string{"clean", "repaired", "needs-human"}

// Outcomes returns the names of all outcomes.
func Outcomes() []string { return slices.Clone(outcomes) }

// Check checks the file system on an unmounted device and returns the output of the program. A device in use is a fault State. On
// ext2/3/4 it makes the repairs that need no decision (e2fsck -p). On all others it only reads:
// the kernel replays their journals, and their repair programs are for people. NeedsHuman
// comes from a rehearsal, so nothing was written, unless the error says that the repair itself
// failed. A repair that has begun goes on to its end, whatever becomes of ctx and this process.
func (p *Programs) Check(ctx context.Context, device, name string) (Outcome, string, error) {
	t := fstype.Of(name)
	if len(t.Check) == 0 {
		return NeedsHuman, "", fault.New(fault.State, "no program is known that checks %s", name)
	}
	if err := unused(device); err != nil {
		return NeedsHuman, "", err
	}
	return p.check(ctx, t, device)
}

// unused returns a fault State if somebody uses the device. What a program reads of a mounted file system looks like damage, and what it
// writes is damage; not every program notices. An image file is nobody's.
func unused(device string) error {
	busy, err := mounter.Busy(device)
	switch {
	case errors.Is(err, linux.ENOTBLK):
		return nil
	case err == nil && busy:
		return fault.New(fault.State, "%s is in use: the programs of a file system need it unmounted", device)
	}
	return err
}

func (p *Programs) check(ctx context.Context, t fstype.Type, device string, flags ...string) (Outcome, string, error) {
	if t.CopyMetadata != nil {
		return p.preen(ctx, t, device, flags...)
	}
	out, code, err := p.run(ctx, append(slices.Clone(t.Check), flags...), device)
	if err != nil || code != 0 {
		return NeedsHuman, out, err
	}
	return Clean, out, nil
}

// preen makes the repairs that need no decision. e2fsck -p writes before it notices that it must
// give up (it replays the journal, repairs some damage, and marks the superblock). So it runs
// on a copy of the metadata first, which shows the outcome.
func (p *Programs) preen(ctx context.Context, t fstype.Type, device string, flags ...string) (Outcome, string, error) {
	argv := append(slices.Clone(t.Check), flags...)
	if outcome, out, err := p.rehearse(ctx, t.CopyMetadata, argv, device); err != nil || outcome == NeedsHuman {
		return NeedsHuman, out, err
	}
	out, code, err := p.run(ctx, argv, device)
	if err != nil {
		return NeedsHuman, out, err
	}
	return preened(argv, device, out, code)
}

// preened interprets an exit status of fsck(8).
func preened(argv []string, device, out string, code int) (Outcome, string, error) {
	const repaired, rebootNeeded, uncorrected = 1, 2, 4
	switch {
	case code == 0:
		return Clean, out, nil
	case code&^(repaired|rebootNeeded) == 0:
		return Repaired, out, nil
	case code&uncorrected != 0:
		return NeedsHuman, out, nil
	default:
		return NeedsHuman, out, fmt.Errorf("%s %s: exit status %d: %s", strings.Join(argv, " "), device, code, out)
	}
}

// rehearse runs argv on a sparse copy of the device's metadata. The program copier makes the copy:
// superblocks, bitmaps, inodes, directories and the journal. The copy has no file data, which a
// check does not read.
func (p *Programs) rehearse(ctx context.Context, copier, argv []string, device string) (_ Outcome, _ string, err error) {
	f, err := os.CreateTemp(p.Scratch, copyPrefix)
	if err != nil {
		return NeedsHuman, "", err
	}
	defer f.Close()
	// Remove the file only at the end: the confined program needs a bind mount of it, and a
	// file without a name cannot be mounted.
	defer func() { err = errors.Join(err, os.Remove(f.Name())) }()
	out, code, err := p.runOnCopy(ctx, f, device, append(slices.Clone(copier), confine.Inside(device), confine.CopyPath)...)
	if err != nil {
		return NeedsHuman, out, err
	}
	if code != 0 && strings.Contains(strings.ToLower(out), linux.ENOSPC.Error()) {
		return NeedsHuman, out, fault.New(fault.NoSpace,
			"%s is damaged, and its repair is tried on a copy of its metadata first, for which "+
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
	return preened(argv, device, out, code)
}

const copyPrefix = "check-"

// Clear removes the copies that an earlier process left in Scratch.
func (p *Programs) Clear() error {
	if p.Scratch == "" {
		return nil // os.TempDir has other programs' files too
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

// runOnCopy runs a program with f at confine.CopyPath. The program dies with this process,
// because a copy can be lost.
func (p *Programs) runOnCopy(ctx context.Context, f *os.File, device string, argv ...string) (string, int, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.SysProcAttr = linux.KilledWithThread()
	return p.start(ctx, cmd, confine.Limits{Device: device, Copy: f})
}

// CheckCommand returns the command with which a person examines a damaged, unmounted file
// system. It changes nothing.
func CheckCommand(device, name string) string {
	look := fstype.Of(name).Look
	if len(look) == 0 {
		look = []string{"fsck", "-n"} // selects the program by type
	}
	return strings.Join(look, " ") + " " + device
}
