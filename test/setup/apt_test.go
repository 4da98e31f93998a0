package setup

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// noPackages makes a configuration for apt with which it knows no package, and has its lists and locks in a directory. It returns its name.
func noPackages(t *testing.T, dir string) (config string) {
	t.Helper()
	config = filepath.Join(dir, "apt.conf")
	text := `Dir::State "` + dir + `"; Dir::State::status "` + dir + `/status"; Dir::Cache "` + dir + `/cache";
Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "/dev/null";
`
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "lists"), 0o755), os.WriteFile(config, []byte(text), 0o644),
		os.WriteFile(filepath.Join(dir, "status"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	return config
}

// A new machine updates itself in its first minutes: what sets up the tests waits for it. apt never waits for the lock of its lists.
func TestFleet_AMachineThatUpdatesItself(t *testing.T) {
	dir := t.TempDir()
	config, lists := noPackages(t, dir), filepath.Join(dir, "lists")
	lock, err := os.Create(filepath.Join(lists, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.FcntlFlock(lock.Fd(), syscall.F_SETLK, &syscall.Flock_t{Type: syscall.F_WRLCK}); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("../../scripts/apt.sh", "update")
	c.Env = append(append(os.Environ(), german...), "APT_CONFIG="+config)
	out, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	said := bufio.NewReader(out)
	first, err := said.ReadString('\n')
	if !strings.HasPrefix(first, "apt: waiting until another process has finished: E: Could not get lock "+lists) {
		t.Errorf("%q, %v", first, err)
	}
	if err := syscall.FcntlFlock(lock.Fd(), syscall.F_SETLK, &syscall.Flock_t{Type: syscall.F_UNLCK}); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(said)
	if err := c.Wait(); err != nil || len(rest) > 0 {
		t.Errorf("%v\n%s", err, rest)
	}
}

// What cannot be had is not waited for.
func TestFleet_APackageThatDoesNotExist(t *testing.T) {
	c := exec.Command("../../scripts/apt.sh", "install", "no-such-package")
	c.Env = append(os.Environ(), "APT_CONFIG="+noPackages(t, t.TempDir()))
	out, err := c.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "Unable to locate package no-such-package") {
		t.Errorf("%v\n%s", err, out)
	}
}
