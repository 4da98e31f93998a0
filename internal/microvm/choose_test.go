package microvm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// elsewhere makes the test run on a machine with a given KVM and no verdict. A program named
// qemu-system-x86_64 is found first: the real one, except under KVM, where it runs the shell
// script.
func elsewhere(t *testing.T, kvm string) (c Config, trials func() int) {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvm") // a short path, because sockets are below
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	was := []string{kvmDevice, bootID, stateDir}
	t.Cleanup(func() { kvmDevice, bootID, stateDir = was[0], was[1], was[2] })
	kvmDevice, bootID, stateDir = dir+"/kvm", dir+"/boot", dir+"/run/crust"
	write(t, kvmDevice, "")
	write(t, bootID, "boot one\n")
	write(t, dir+"/version", "QEMU emulator version 1.2.3\n")
	qemu, err := exec.LookPath(program)
	if err != nil {
		t.Fatal(err, ": run `make guest`")
	}
	script := fmt.Sprintf(`#!/bin/sh
case "$*" in
--version) exec cat %[1]s/version ;;
*accel=kvm*)
	echo >> %[1]s/trials
	%[2]s
	;;
esac
exec %[3]s "$@"
`, dir, kvm, qemu)
	if err := os.MkdirAll(dir+"/bin", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/bin/"+program, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+"/bin:"+os.Getenv("PATH"))
	t.Setenv(AccelVariable, "")
	guest, err := filepath.Abs("../../.cache/guest")
	if err != nil {
		t.Fatal(err)
	}
	return Config{Kernel: guest + "/vmlinuz", Initrd: guest + "/initramfs"}, func() int {
		b, _ := os.ReadFile(dir + "/trials")
		return strings.Count(string(b), "\n")
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func choose(t *testing.T, c Config) Choice {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute) // however slow this machine is
	defer cancel()
	got, err := Choose(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// underKVM returns the shell script of a KVM: where the guest's console goes, and one more
// argument. In reality it emulates.
func underKVM(console, more string) string {
	return `for a; do
	shift
	case $a in
	*accel=kvm*) a=q35,accel=tcg ;;
	host) a=max,la57=off,erms=off ;;
	file,id=console,path=*) ` + console + ` ;;
	esac
	set -- "$@" "$a"
done
set -- "$@" ` + more
}

var (
	works = underKVM(":", "")
	// QEMU is there and answers QMP, but the guest has stopped after its first line.
	hangs = underKVM("echo 'Probing EDD (edd=off to disable)... ok' > ${a#*path=}; a=file,id=console,path=/dev/null", "-S")
)

func TestKVMThatHangsAfterTheFirstLineIsNotChosen(t *testing.T) {
	c, trials := elsewhere(t, hangs)
	got := choose(t, c)
	if got.Accel != "tcg" || !strings.Contains(got.Why, "hangs") || !strings.Contains(got.Why, "emulated") {
		t.Fatalf("%+v", got)
	}
	st, err := os.Stat(verdictFile())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("the verdict's file: %v %v", st, err)
	}
	// Known from now on, and reported again.
	begin := time.Now()
	if again := choose(t, c); again != got {
		t.Errorf("%+v, then %+v", got, again)
	}
	t.Logf("the second choice took %s", time.Since(begin))
	if n := trials(); n != 1 {
		t.Errorf("KVM was tried %d times", n)
	}
	// A user's choice overrides the verdict, and the flag overrides the environment.
	t.Setenv(AccelVariable, "kvm")
	if got := choose(t, c); got != (Choice{Accel: "kvm"}) {
		t.Errorf("%s=kvm: %+v", AccelVariable, got)
	}
	for flag, want := range map[string]string{"tcg": "tcg", "auto": "tcg", "kvm": "kvm"} {
		c.Accel = flag
		if got := choose(t, c); got.Accel != want {
			t.Errorf("%s: %+v", flag, got)
		}
	}
	c.Accel = ""
	t.Setenv(AccelVariable, "hvf")
	if _, err := Choose(context.Background(), c); err == nil || !strings.Contains(err.Error(), AccelVariable+` "hvf": kvm, tcg`) {
		t.Errorf("%v", err)
	}
	t.Setenv(AccelVariable, "")
	left, err := filepath.Glob(stateDir + "/.*")
	if err != nil || len(left) != 0 {
		t.Errorf("left in the state: %v %v", left, err)
	}
}

func TestKVMIsChosenWhenAnAgentHasAnsweredUnderIt(t *testing.T) {
	c, trials := elsewhere(t, works)
	// What a trial that was killed has left.
	for _, accel := range []string{"kvm", "tcg"} {
		if err := os.MkdirAll(stateDir+"/trial-"+accel, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, stateDir+"/trial-"+accel+"/console", "Linux")
	}
	temporary := t.TempDir()
	t.Setenv("TMPDIR", temporary)
	for range 2 {
		if got := choose(t, c); got != (Choice{Accel: "kvm"}) {
			t.Fatalf("%+v", got)
		}
	}
	if n := trials(); n != 1 {
		t.Errorf("KVM was tried %d times", n)
	}
	left, err := filepath.Glob(stateDir + "/trial-*")
	more, err2 := os.ReadDir(temporary)
	if err != nil || err2 != nil || len(left)+len(more) > 0 {
		t.Errorf("left: %v %v %v %v", left, more, err, err2)
	}
	// Cases that void the verdict. Without an image no trial is possible, so the choice shows
	// whether the verdict holds.
	c.Initrd = t.TempDir() + "/initramfs"
	if got := choose(t, c); got.Accel != "kvm" {
		t.Fatalf("%+v", got)
	}
	dir := filepath.Dir(bootID)
	good, err := os.ReadFile(verdictFile())
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(){
		"another boot":         func() { write(t, bootID, "boot two\n") },
		"another QEMU":         func() { write(t, dir+"/version", "QEMU emulator version 1.2.4\n") },
		"a torn file":          func() { write(t, verdictFile(), string(good[:len(good)/2])) },
		"an empty file":        func() { write(t, verdictFile(), "") },
		"a file of any user's": func() { _ = os.Chmod(verdictFile(), 0o666) },
		"a link": func() {
			write(t, dir+"/else", string(good))
			_ = os.Remove(verdictFile())
			_ = os.Symlink(dir+"/else", verdictFile())
		},
	} {
		change()
		if got := choose(t, c); got.Accel != "tcg" || !strings.Contains(got.Why, "initramfs") {
			t.Errorf("%s: %+v", what, got)
		}
		write(t, bootID, "boot one\n")
		write(t, dir+"/version", "QEMU emulator version 1.2.3\n")
		_ = os.Remove(verdictFile())
		write(t, verdictFile(), string(good))
		if got := choose(t, c); got.Accel != "kvm" {
			t.Fatalf("%s, restored: %+v", what, got)
		}
	}
}

func TestAKVMThatQEMURefusesIsNotChosen(t *testing.T) {
	c, trials := elsewhere(t, "echo 'failed to initialize kvm: Device busy' >&2; exit 1")
	got := choose(t, c)
	if got.Accel != "tcg" || !strings.Contains(got.Why, "failed to initialize kvm: Device busy") {
		t.Errorf("%+v", got)
	}
	choose(t, c)
	if n := trials(); n != 1 {
		t.Errorf("KVM was tried %d times", n)
	}
}

// Pods that begin at once on a machine that has just booted try KVM once, whatever the trial tells.
func TestManyAtOnceTryKVMOnce(t *testing.T) {
	for what, spoil := range map[string]func(c *Config){
		"KVM does not work":          func(*Config) {},
		"no guest answers, anywhere": func(c *Config) { c.Initrd = t.TempDir() + "/empty"; write(t, c.Initrd, "") },
	} {
		c, trials := elsewhere(t, "exit 1")
		spoil(&c)
		// So that an emulated guest has answered, on any machine, before the trial ends.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if choice, err := Choose(ctx, c); err != nil || choice.Accel != "tcg" {
					t.Errorf("%s: %+v %v", what, choice, err)
				}
			})
		}
		all.Wait()
		if n := trials(); n != 1 {
			t.Errorf("%s: %d trials", what, n)
		}
	}
}

// An inconclusive result is not stored.
func TestWithoutATrialNothingIsRemembered(t *testing.T) {
	for what, spoil := range map[string]func(c *Config){
		"there is no guest image": func(c *Config) { c.Initrd = t.TempDir() + "/initramfs" },
		"the guest has no agent":  func(c *Config) { c.Initrd = t.TempDir() + "/empty"; write(t, c.Initrd, "") },
		"there is no KVM":         func(*Config) { kvmDevice += "-is-not-here" },
	} {
		c, _ := elsewhere(t, "exit 1")
		spoil(&c)
		if got := choose(t, c); got.Accel != "tcg" || got.Why == "" {
			t.Errorf("%s: %+v", what, got)
		}
		if _, err := os.Stat(verdictFile()); !os.IsNotExist(err) {
			t.Errorf("%s: a verdict was kept: %v", what, err)
		}
	}
	// Nor is the result if the user stops waiting.
	c, _ := elsewhere(t, hangs)
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	if got, err := Choose(ctx, c); err != nil || got.Accel != "tcg" {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := os.Stat(verdictFile()); !os.IsNotExist(err) {
		t.Errorf("a verdict was kept: %v", err)
	}
}

// Without QEMU nothing is decided about KVM, whatever was asked for, and nothing is left behind.
func TestFleet_WithoutQEMU(t *testing.T) {
	c, _ := elsewhere(t, "exit 1")
	t.Setenv("PATH", t.TempDir())
	files := t.TempDir()
	c.Dir, c.Kernel, c.Initrd = files+"/vm", files+"/vmlinuz", files+"/initramfs"
	write(t, c.Kernel, "")
	write(t, c.Initrd, "")
	for _, accel := range []string{"", "auto", "kvm", "tcg"} {
		c.Accel = accel
		choice, chosen := Choose(context.Background(), c)
		vm, started := Start(context.Background(), c)
		for call, err := range map[string]error{"Choose": chosen, "Start": started} {
			if text := fmt.Sprint(err); !strings.Contains(text, program) || !strings.Contains(text, "apt-get install qemu-system-x86") ||
				strings.Contains(strings.ToLower(text), "kvm") || strings.Contains(text, "\n") {
				t.Errorf("%s with %q: %s", call, accel, text)
			}
		}
		if choice != (Choice{}) || vm != nil {
			t.Errorf("with %q: %+v, %+v", accel, choice, vm)
		}
	}
	for _, path := range []string{c.Dir, stateDir} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("left: %s: %v", path, err)
		}
	}
}

// On this machine, whatever its KVM is like, a guest boots with the choice.
func TestAGuestComesUpWithWhatIsChosen(t *testing.T) {
	guest, err := filepath.Abs("../../.cache/guest")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "vm")
	begin := time.Now()
	vm, err := Start(context.Background(), Config{Dir: dir, Kernel: guest + "/vmlinuz", Initrd: guest + "/initramfs", DieWithParent: true})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Kill()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := vm.Answers(ctx); err != nil {
		console, _ := os.ReadFile(vm.Console)
		t.Fatalf("with %s: %v\n%s", vm.Accel, err, console)
	}
	t.Logf("with %s after %s", vm.Accel, time.Since(begin))
}
