package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/record"
)

// AccelVariable is the environment variable that overrides the choice.
const AccelVariable = "CRUST_ACCEL"

// Choice is how a guest will be run.
type Choice struct {
	Accel string // kvm or tcg (software emulation)
	// Why is a sentence for users, set if emulation was chosen without being requested.
	Why string
}

// trialLimit limits a trial, unless the caller waits for longer than twice that. An emulated guest
// answers within 5 s on an idle machine.
const trialLimit = 30 * time.Second

// Variables, so that tests can simulate another machine.
var (
	kvmDevice = "/dev/kvm"
	bootID    = "/proc/sys/kernel/random/boot_id"
	stateDir  = "/run/crust"
)

// verdict is the result of a trial. It is valid for one boot of the machine and one QEMU.
type verdict struct {
	Boot string `json:"boot"`
	QEMU string `json:"qemu"`
	KVM  bool   `json:"kvm"`
	Why  string `json:"why,omitempty"`
}

var verdicts = record.Type{Kind: "accelerator", Version: 1}

func verdictFile() string { return filepath.Join(stateDir, "accelerator"+record.Extension) }

// Choose decides between KVM and emulation. A Config.Accel of "kvm" or "tcg" decides; if it is "",
// the variable CRUST_ACCEL does likewise. Otherwise ("auto") KVM is chosen only if a guest's agent
// has answered under it: a /dev/kvm that can be opened may still hang every guest, after any number
// of lines on its console. The trial takes seconds; its verdict is kept for this boot of the
// machine. If the trial is inconclusive (there is no image, or not even an emulated guest answers),
// this choice is emulation and the next one tries again. Without QEMU there is no choice, but an error.
func Choose(ctx context.Context, c Config) (Choice, error) {
	if err := installed(); err != nil {
		return Choice{}, err
	}
	asked, from := c.Accel, "accelerator"
	if asked == "" {
		asked, from = os.Getenv(AccelVariable), AccelVariable
	}
	switch asked {
	case "kvm", "tcg":
		return Choice{Accel: asked}, nil
	case "", "auto":
	default:
		return Choice{}, fmt.Errorf("%s %q: kvm, tcg (emulation) or auto", from, asked)
	}
	f, err := os.OpenFile(kvmDevice, os.O_RDWR, 0)
	if err != nil {
		return emulated(fmt.Sprintf("there is no KVM here (%v)", err)), nil
	}
	f.Close()
	key, err := verdictKey(ctx)
	if err != nil {
		return emulated(fmt.Sprintf("nothing is known of KVM here (%v)", err)), nil
	}
	v, known := readVerdict(key)
	if !known {
		if v, err = c.tryAlone(ctx, key); err != nil {
			return emulated(fmt.Sprintf("KVM could not be tried (%v)", err)), nil
		}
	}
	if v.KVM {
		return Choice{Accel: "kvm"}, nil
	}
	return emulated(v.Why), nil
}

func emulated(why string) Choice {
	why = strings.Join(strings.Fields(why), " ") // one line
	return Choice{Accel: "tcg", Why: why + ": the guest is emulated, which is slower (" + AccelVariable + "=kvm insists on KVM)"}
}

// verdictKey returns a verdict for this boot and this QEMU, without a result.
func verdictKey(ctx context.Context) (verdict, error) {
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return verdict{}, err
	}
	said, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return verdict{}, fmt.Errorf("%s --version: %w", program, err)
	}
	version, _, _ := strings.Cut(string(said), "\n")
	return verdict{Boot: strings.TrimSpace(string(boot)), QEMU: version}, nil
}

// readVerdict reads the verdict with that key. It ignores a file that is damaged, or that others
// may write.
func readVerdict(key verdict) (v verdict, known bool) {
	f, err := linux.Open(verdictFile(), os.O_RDONLY|linux.ONofollow)
	if err != nil {
		return v, false
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Mode().Perm()&0o022 != 0 {
		return v, false
	}
	const most = 4096
	b, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil || verdicts.Decode(b, &v) != nil {
		return v, false
	}
	return v, v.Boot == key.Boot && v.QEMU == key.QEMU
}

// write stores the verdict, mode 0600. Several processes may do this at once, so each has its own
// file until the rename.
func (v verdict) write() error {
	b, err := verdicts.Encode(v)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(stateDir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(stateDir, ".accelerator-")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), verdictFile())
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// tryAlone tries while nobody else does: many guests may be started at once, on a machine that has just booted, and each trial boots two
// more. Who waited for another's trial uses its outcome, even if that was none: a busy machine would not tell the next one more.
func (c Config) tryAlone(ctx context.Context, key verdict) (verdict, error) {
	lock, err := trialLock()
	if err == nil {
		defer lock.Close()
		begin := time.Now()
		if err := linux.FlockWithin(ctx, lock); err != nil {
			return key, err
		}
		if v, known := readVerdict(key); known {
			return v, nil
		}
		if err := inconclusive(lock, begin); err != nil {
			return key, err
		}
	}
	v, err := c.try(ctx, key, lock != nil)
	if err == nil {
		_ = v.write() // then the next one tries again
	} else if lock != nil && ctx.Err() == nil {
		_ = lock.Truncate(0)
		_, _ = lock.WriteAt([]byte(err.Error()), 0) // the same
	}
	return v, err
}

// inconclusive returns why a trial that ended since then told nothing, if there was one.
func inconclusive(lock *os.File, since time.Time) error {
	st, err := lock.Stat()
	if err != nil || !st.ModTime().After(since) || st.ModTime().After(time.Now().Add(time.Second)) {
		return nil // a trial of its own; a time to come is of a clock that was set back
	}
	const most = 4096
	text, err := io.ReadAll(io.LimitReader(lock, most))
	if err != nil || len(text) == 0 {
		return nil // the same
	}
	return fmt.Errorf("another guest tried just now: %s", text)
}

// trialLock opens the lock of trials. On an error the caller goes on: then verdicts cannot be stored either.
func trialLock() (*os.File, error) {
	if err := os.MkdirAll(stateDir, 0o755); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(stateDir, "accelerator.lock"), os.O_RDWR|os.O_CREATE, 0o600)
}

// answer is the outcome of one guest of a trial.
type answer struct {
	took time.Duration
	err  error
}

// try boots the image twice at once, with KVM and emulated. The emulated guest shows how long a
// boot takes here and now, and that the image is good: KVM is to blame only if emulation answers
// and KVM does not, given twice the time. Anything else is inconclusive, and an error. alone tells that nobody else tries.
func (c Config) try(caller context.Context, v verdict, alone bool) (verdict, error) {
	if err := c.image(); err != nil {
		return v, err
	}
	limit := trialLimit
	if end, ok := caller.Deadline(); ok {
		limit = max(limit, time.Until(end)/2) // the rest is for the guest itself
	}
	ctx, cancel := context.WithTimeout(caller, limit)
	defer cancel()
	kvm, stopKVM := c.guest(ctx, "kvm", alone)
	tcg, stopTCG := c.guest(ctx, "tcg", alone)
	defer func() { stopKVM(); stopTCG() }()
	no := func(err error) (verdict, error) {
		v.Why = fmt.Sprintf("%s is there, but a guest does not run under it (%v)", kvmDevice, err)
		return v, nil
	}
	var failed error              // error of the guest under KVM
	var patience <-chan time.Time // for it, once the emulated guest has answered
	for {
		select {
		case k := <-kvm:
			switch {
			case k.err == nil:
				v.KVM = true
				return v, nil
			case caller.Err() != nil:
				return v, caller.Err()
			case patience != nil:
				return no(k.err)
			case tcg == nil:
				return v, fmt.Errorf("no guest answers, not even an emulated one: %w", k.err)
			}
			failed, kvm = k.err, nil
		case e := <-tcg:
			switch {
			case e.err == nil && kvm == nil:
				return no(failed)
			case e.err == nil:
				stopTCG()
				patience = time.After(e.took)
			case kvm == nil:
				return v, fmt.Errorf("no guest answers, not even an emulated one: %w", e.err)
			}
			tcg = nil
		case <-patience:
			return no(errors.New("it hangs"))
		}
	}
}

// guest boots a guest in its own directory, and sends the result once its agent has answered or
// failed. stop ends it and waits for that.
func (c Config) guest(ctx context.Context, accel string, alone bool) (<-chan answer, func()) {
	ctx, cancel := context.WithCancel(ctx)
	said, done := make(chan answer, 1), make(chan struct{})
	begin := time.Now()
	go func() {
		defer close(done)
		said <- func() answer {
			dir, err := trialDir(accel, alone)
			if err != nil {
				return answer{err: err}
			}
			defer removeGuest(dir)
			// The guest ends with this goroutine's thread, and so also with a killed process.
			vm, err := Start(ctx, Config{Dir: dir, Kernel: c.Kernel, Initrd: c.Initrd, Accel: accel, DieWithParent: true})
			if err != nil {
				said, _ := os.ReadFile(filepath.Join(dir, "qemu.log"))
				if first, _, _ := strings.Cut(strings.TrimSpace(string(said)), "\n"); first != "" {
					err = errors.New(first)
				}
				return answer{err: err}
			}
			defer vm.Kill()
			return answer{err: vm.Answers(ctx), took: time.Since(begin)}
		}()
	}()
	return said, func() { cancel(); <-done }
}

// trialDir makes the directory of a trial's guest. Who tries alone removes what a trial that was killed has left.
func trialDir(accel string, alone bool) (string, error) {
	if !alone {
		return os.MkdirTemp("", "crust-accel-")
	}
	dir := filepath.Join(stateDir, "trial-"+accel)
	removeGuest(dir)
	return dir, os.Mkdir(dir, 0o700)
}

// removeGuest removes the files of Start and QEMU from the directory.
func removeGuest(dir string) {
	for _, name := range []string{"qmp.sock", "guest.sock", "console", "qemu.log", ""} {
		_ = os.Remove(filepath.Join(dir, name)) // what cannot be removed is in the way of the next trial, which says so
	}
}
