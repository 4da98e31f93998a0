// Package fsprogs runs the programs of a file system: mkfs, fsck, resize2fs, btrfstune. They
// run when a volume is staged for the first time, when it is damaged, and when it must be grown
// offline. They never run for an ordinary publish.
package fsprogs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/internal/confine"
	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/tracing"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/mounter/superblock"
)

// Programs runs the programs of file systems.
type Programs struct {
	// Scratch is a directory for copies of a file system's metadata, each as large as the
	// metadata. A copy is removed when its check ends. Clear removes those of a killed process.
	// If Scratch is empty, it is os.TempDir.
	Scratch string

	started func(program string)
}

// New returns a Programs that calls started, if not nil, before each program.
func New(started func(program string)) *Programs {
	return &Programs{started: started}
}

// Format makes a file system on a device that was proven blank. It is the only way to make one. A
// device that is too small for it is a fault OutOfRange. On a device with reserved space (thick),
// mkfs initializes everything at once: the kernel's later zeroing could release the reservation.
func (p *Programs) Format(ctx context.Context, blank superblock.BlankDevice, name string, thick bool) error {
	t := fstype.Of(name)
	if len(t.Make) == 0 {
		return fault.New(fault.Invalid, "file system %q cannot be made here; choose one of %s", name, strings.Join(fstype.Formats(), ", "))
	}
	if err := blank.Verify(); err != nil {
		return err
	}
	if err := blank.Fits(name); err != nil {
		return err
	}
	argv := slices.Clone(t.Make)
	if thick {
		argv = append(argv, t.Whole...)
	}
	if blank.Resumed() {
		// Remains of the first attempt must not stop mkfs.
		argv = append(argv, t.Force)
	}
	if err := failpoint.Err("mkfs.before"); err != nil {
		return err
	}
	out, code, err := p.runMortal(ctx, argv, blank.Path())
	if err == nil {
		err = failpoint.Err("mkfs.after")
	}
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("%s %s: exit status %d: %s", argv[0], blank.Path(), code, out)
	}
	return nil
}

// Grow grows an unmounted file system to the size of its device, where the kernel has no online
// growth or this process may not use it. It runs a full check first, which resize2fs requires. A device in use is a fault State.
// If the program does not grow it, and another check finds it whole, mounter.ErrGrowRefused is in the error chain.
func (p *Programs) Grow(ctx context.Context, device, name string) error {
	t := fstype.Of(name)
	if err := mounter.NeverGrows(name); err != nil {
		return fmt.Errorf("the device %s: %w", device, err)
	}
	if len(t.Resize) == 0 {
		return fault.New(fault.State, "no program is known that grows %s on %s", name, device)
	}
	if err := unused(device); err != nil {
		return err
	}
	if t.Replayed {
		// A mount of a damaged file system may write to it.
		if err := p.checkFully(ctx, t, device); err != nil {
			return err
		}
		if err := replay(device, name); err != nil {
			return err
		}
	}
	if err := p.checkFully(ctx, t, device); err != nil {
		return err
	}
	if err := failpoint.Err("grow.checked"); err != nil {
		return err
	}
	err := p.must(ctx, t.Resize, device)
	if err == nil {
		err = grown(device, t.Resize)
	}
	if err == nil {
		return nil
	}
	// A program that refuses changes nothing, but one that breaks off may have begun.
	if cerr := p.checkFully(ctx, t, device); cerr != nil {
		return errors.Join(err, cerr)
	}
	return fmt.Errorf("%w; %w, and a check found the file system whole", err, mounter.ErrGrowRefused)
}

func (p *Programs) checkFully(ctx context.Context, t fstype.Type, device string) error {
	outcome, out, err := p.check(ctx, t, device, t.Fully...)
	if err != nil {
		return err
	}
	if outcome == NeedsHuman {
		person := strings.Join(append([]string{t.Check[0]}, append(slices.Clone(t.Fully), device)...), " ")
		return fault.New(fault.State, "the file system on %s needs a person before it can grow: run `%s`. It said: %s", device, person, out)
	}
	return nil
}

// grown checks that a file system fills its device. Some programs exit with 0 although they refused.
func grown(device string, program []string) error {
	dev, err := mounter.FindDevice(device)
	if err != nil {
		return err
	}
	size, err := mounter.DeviceSize(dev)
	if err != nil {
		return err
	}
	now, err := superblock.ProbeDevice(device)
	if err != nil {
		return err
	}
	if now.Content != superblock.Known || mounter.Unfilled(now, size) {
		return fmt.Errorf("%s %s: exit status 0, and the device of %d bytes holds %s of %d bytes: it did not grow; try again, or look at it "+
			"with `%s`", strings.Join(program, " "), device, size, now, now.Size, CheckCommand(device, now.Type))
	}
	return nil
}

// replay lets the kernel replay a file system's log: it mounts it where nobody sees it.
func replay(device, name string) error {
	dev, err := mounter.FindDevice(device)
	if err != nil {
		return err
	}
	m, err := mounter.Open(mounter.Filesystem{Device: dev, Type: name})
	if err != nil {
		return err
	}
	return m.Close()
}

// NewID gives an unmounted file system a new identity, if the kernel could not mount a copy
// beside its origin otherwise (btrfs before Linux 6.7). It does nothing for other types. A device in use is a fault State.
func (p *Programs) NewID(ctx context.Context, device, name string) error {
	argv := fstype.Of(name).NewID
	if len(argv) == 0 {
		return nil
	}
	if err := unused(device); err != nil {
		return err
	}
	found, err := superblock.ProbeDevice(device)
	if err != nil {
		return err
	}
	if found.Log {
		// btrfstune would commit without it. The log is then of an earlier generation, which no kernel mounts.
		if err := replay(device, name); err != nil {
			return err
		}
	}
	return p.must(ctx, argv, device)
}

// must runs a program and turns a non-zero exit status into an error.
func (p *Programs) must(ctx context.Context, argv []string, device string) error {
	out, code, err := p.run(ctx, argv, device)
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("%s %s: exit status %d: %s", strings.Join(argv, " "), device, code, out)
	}
	return nil
}

// ProbeConfinement tests whether the programs can be confined to their device. Without
// confinement they do not run.
func (p *Programs) ProbeConfinement() mounter.Feature {
	f := mounter.Feature{
		Name: "confinement of mkfs and fsck", Answer: mounter.Yes, Since: "any",
		Cost: "no volume can be formatted or checked",
	}
	if err := confine.Run(exec.Command("true"), confine.Limits{}, linux.Starting()); err != nil {
		f.Answer, f.Why = mounter.CannotTell, err.Error()
	}
	return f
}

// run runs a program that changes a file system. Once started, it runs to its end even if the
// caller or this process goes away: half a repair is worse than none.
func (p *Programs) run(ctx context.Context, argv []string, device string) (string, int, error) {
	if err := ctx.Err(); err != nil {
		return "", 0, err
	}
	return p.start(context.WithoutCancel(ctx), exec.Command(argv[0], append(slices.Clone(argv[1:]), confine.Inside(device))...),
		confine.Limits{Device: device})
}

// runMortal is like run for a program that must die with this process. A second mkfs beside one
// of an earlier process would ruin both.
func (p *Programs) runMortal(ctx context.Context, argv []string, device string) (string, int, error) {
	cmd := exec.CommandContext(ctx, argv[0], append(slices.Clone(argv[1:]), confine.Inside(device))...)
	cmd.SysProcAttr = linux.KilledWithThread()
	return p.start(ctx, cmd, confine.Limits{Device: device})
}

// start runs a program in confinement, because a tenant wrote the data that it reads.
func (p *Programs) start(ctx context.Context, cmd *exec.Cmd, limits confine.Limits) (output string, code int, err error) {
	program, device := cmd.Args[0], limits.Device
	if p.started != nil {
		p.started(program)
	}
	sctx, end := tracing.Begin(ctx, program)
	defer func() {
		tracing.ExitCode(sctx, code)
		end(err)
	}()
	// Use a file, not a pipe: a write to the pipe of a dead process would end a check half-way. The file is bounded: what a tenant wrote
	// may make a check say very much.
	said, err := linux.BoundedMemfd("output of "+program, mostOutput)
	if err != nil {
		return "", 0, err
	}
	defer said.Close()
	cmd.Stdout, cmd.Stderr = said, said
	err = confine.Run(cmd, limits, linux.Starting())
	written, rerr := said.Seek(0, io.SeekCurrent) // the program wrote through the same open file
	var b []byte
	if rerr == nil {
		const end = 64 << 10
		begin := max(0, written-end)
		b, rerr = io.ReadAll(io.NewSectionReader(said, begin, written-begin))
	}
	if rerr != nil {
		return "", 0, errors.Join(err, rerr)
	}
	out := strings.ReplaceAll(tail(string(b)), confine.Inside(device), device)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out, 0, nil
	case ctx.Err() != nil:
		return out, 0, fmt.Errorf("%s %s was stopped: %w", program, device, context.Cause(ctx))
	case errors.Is(err, exec.ErrNotFound):
		return out, 0, fault.New(fault.State, "%s is not installed (Debian: apt-get install %s)", program, fstype.PackageOf(program))
	case errors.As(err, &exit) && exit.Exited():
		return out, exit.ExitCode(), nil
	default:
		return out, 0, fmt.Errorf("%s %s: %w: %s", program, device, err, out)
	}
}

// mostOutput is how many bytes of a program's output are kept, in memory. The rest is lost.
const mostOutput = 4 << 20

// tail returns the end of a program's output as one line.
func tail(s string) string {
	const limit = 1000
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > limit {
		s = "..." + strings.ToValidUTF8(s[len(s)-limit:], "")
	}
	return s
}
