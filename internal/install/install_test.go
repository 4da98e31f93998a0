package install_test

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/crust-csi/crust-csi/internal/install"
)

func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// C24: a pod goes on with the version of a program that it began with. A version that nobody runs is removed.
func TestC24_AVersionThatRunsIsKept(t *testing.T) {
	dir := t.TempDir()
	content, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	put := func(suffix string) (version string) {
		t.Helper()
		next := append(slices.Clone(content), suffix...)
		if err := install.Version(t.Context(), slog.New(slog.DiscardHandler), dir, "program", next); err != nil {
			t.Fatal(err)
		}
		version, err := os.Readlink(filepath.Join(dir, "program"))
		if err != nil {
			t.Fatal(err)
		}
		return version
	}
	foreign := []string{"program-of-somebody", "program-0123456789ab.txt"}
	killed := filepath.Join(dir, "program-0123456789ab.new-123") // an installation that did not end
	if err := os.WriteFile(killed, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range foreign {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	first := put("1")
	if again := put("1"); again != first {
		t.Errorf("the same content has two versions: %s and %s", first, again)
	}
	runs := exec.Command(filepath.Join(dir, "program"), "1000")
	if err := runs.Start(); err != nil {
		t.Fatal(err)
	}
	second := put("2")
	third := put("3")
	check := func(when string, want ...string) {
		t.Helper()
		want = append(append(want, foreign...), "program")
		slices.Sort(want)
		if got := names(t, dir); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	check("one runs", first, second, third)
	fourth := put("4")
	check("one runs still", first, third, fourth)
	if out, err := exec.Command(filepath.Join(dir, first), "--version").CombinedOutput(); err != nil {
		t.Errorf("the version that runs cannot be started again: %v: %s", err, out)
	}
	if err := runs.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = runs.Wait() // killed
	put("4")
	check("none runs", fourth)
}

// An installation of an earlier release made the program a file.
func TestC24_AProgramThatWasAFileBecomesALink(t *testing.T) {
	dir := t.TempDir()
	if err := install.Files(dir, map[string][]byte{"program": []byte("old")}); err != nil {
		t.Fatal(err)
	}
	if err := install.Version(t.Context(), slog.New(slog.DiscardHandler), dir, "program", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "program")); err != nil || string(got) != "new" {
		t.Errorf("%q, %v", got, err)
	}
	if err := install.Files(dir, map[string][]byte{"program": []byte("old")}); err != nil { // it is installed again
		t.Fatal(err)
	}
	if err := install.Version(t.Context(), slog.New(slog.DiscardHandler), dir, "program", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if got := names(t, dir); len(got) != 2 {
		t.Errorf("%q", got)
	}
}

// C24: the programs of crust and crust-vm are installed at the same time. Whoever comes last, the program can be started.
func TestC24_TwoInstallationsAtATime(t *testing.T) {
	dir := t.TempDir()
	var all sync.WaitGroup
	for _, content := range []string{"a", "b", "c"} {
		all.Go(func() {
			for range 200 {
				if err := install.Version(t.Context(), slog.New(slog.DiscardHandler), dir, "program", []byte(content)); err != nil {
					t.Error(err)
					return
				}
				if _, err := os.Stat(filepath.Join(dir, "program")); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if got := names(t, dir); len(got) > 3 {
		t.Errorf("%q", got)
	}
}

// C24: what cannot be removed is no reason not to start.
func TestC24_AnOlderVersionThatStaysStopsNothing(t *testing.T) {
	dir := t.TempDir()
	stays := filepath.Join(dir, "program-0123456789ab")
	if err := exec.Command("sh", "-ec", "touch "+stays+" && mount --bind "+stays+" "+stays).Run(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := exec.Command("umount", stays).Run(); err != nil {
			t.Error(err)
		}
	}()
	var log bytes.Buffer
	if err := install.Version(t.Context(), slog.New(slog.NewTextHandler(&log, nil)), dir, "program", []byte("new")); err != nil {
		t.Error(err)
	}
	if got := names(t, dir); len(got) != 3 || !strings.Contains(log.String(), "could not be removed") {
		t.Errorf("%q, %s", got, log.String())
	}
}
