package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// outcome of a mutant.
type outcome string

const (
	noticed    outcome = "noticed"
	survived   outcome = "SURVIVED"
	equivalent outcome = "equivalent"
	noApply    outcome = "DOES NOT APPLY"
	noCompile  outcome = "DOES NOT COMPILE"
	badTest    outcome = "TEST FAILS WITHOUT IT"
	cutShort   outcome = "cut short"
	notTried   outcome = "not tried, for time was up"
)

// tryAll runs the mutants in o.j copies of the tree.
func tryAll(ctx context.Context, o options, list []mutant) (totals, error) {
	t := totals{count: map[outcome]int{}}
	// Mutants of one test follow each other.
	list = slices.Clone(list)
	if o.limit == 0 {
		slices.SortStableFunc(list, func(a, b mutant) int {
			return strings.Compare(a.pkg+strings.Join(a.tests, " "), b.pkg+strings.Join(b.tests, " "))
		})
	}
	var trees []*tree
	defer func() {
		for _, tr := range trees {
			tr.remove()
		}
	}()
	for range min(max(o.j, 1), max(len(list), 1)) {
		tr, err := newTree(ctx, o)
		if err != nil {
			return t, err
		}
		trees = append(trees, tr)
	}
	work := make(chan mutant)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, tr := range trees {
		wg.Go(func() {
			for m := range work {
				begin := time.Now()
				result, why := tr.try(ctx, m)
				mu.Lock()
				t.count[result]++
				switch result {
				case survived:
					t.survived = append(t.survived, m.name)
				case noApply, noCompile, badTest:
					t.broken = append(t.broken, m.name)
				}
				fmt.Printf("%-21s %s (%s, %.1f s)\n", result, m.name, m.file, time.Since(begin).Seconds())
				if why != "" {
					fmt.Println("    " + strings.ReplaceAll(strings.TrimSpace(why), "\n", "\n    "))
				}
				mu.Unlock()
			}
		})
	}
	begin := time.Now()
	for i, m := range list {
		if o.limit > 0 && time.Since(begin) > o.limit {
			mu.Lock()
			t.count[notTried] = len(list) - i
			mu.Unlock()
			break
		}
		work <- m
	}
	close(work)
	wg.Wait()
	return t, nil
}

// tree is a copy of the repository in which mutants run.
type tree struct {
	o    options
	dir  string
	root string // dir/tree
	tmp  string // TMPDIR of the tests
	good map[string]error
}

func git(ctx context.Context, dir string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, "git", args...)
	c.Dir = dir
	var said bytes.Buffer
	c.Stderr = &said
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, said.String())
	}
	return string(out), nil
}

// newTree copies the files that git tracks or would add. Copies share built and fetched files
// (.cache). The path is short, because a socket's path has at most 108 bytes.
func newTree(ctx context.Context, o options) (*tree, error) {
	t := &tree{o: o, good: map[string]error{}}
	for i := 0; ; i++ {
		t.dir = filepath.Join(os.TempDir(), fmt.Sprint("m", i))
		err := os.Mkdir(t.dir, 0o711) // tests walk through it as other users
		if err == nil {
			break
		} else if !errors.Is(err, os.ErrExist) || i > 1000 {
			return nil, err
		}
	}
	t.root, t.tmp = t.dir+"/tree", t.dir+"/t"
	err := errors.Join(os.Mkdir(t.root, 0o755), os.Mkdir(t.tmp, 0o755), os.Symlink(filepath.Join(o.root, ".cache"), t.root+"/.cache"))
	var names string
	if err == nil {
		names, err = git(ctx, o.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	}
	for name := range strings.SplitSeq(names, "\x00") {
		if err == nil && name != "" {
			err = copyFile(filepath.Join(o.root, name), filepath.Join(t.root, name))
		}
	}
	if err != nil {
		t.remove()
		return nil, err
	}
	return t, nil
}

// copyFile copies a file or a link. It skips a deleted file that git still tracks.
func copyFile(from, to string) error {
	st, err := os.Lstat(from)
	if errors.Is(err, os.ErrNotExist) || err == nil && st.IsDir() {
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if st.Mode()&os.ModeSymlink != 0 {
		link, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(link, to)
	}
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, st.Mode().Perm())
}

// try runs a mutant and returns its outcome.
func (t *tree) try(ctx context.Context, m mutant) (outcome, string) {
	was, is, err := m.apply(t.root)
	switch {
	case err != nil:
		return noApply, err.Error()
	case m.equivalent != "":
		return equivalent, ""
	}
	if err := t.trusted(ctx, m); err != nil {
		if ctx.Err() != nil {
			return cutShort, ""
		}
		return badTest, err.Error()
	}
	path := filepath.Join(t.root, m.file)
	if err := os.WriteFile(path, is, 0o644); err != nil {
		return noApply, err.Error()
	}
	defer func() { _ = os.WriteFile(path, was, 0o644) }() // it was written a moment ago
	if strings.HasSuffix(m.file, ".go") {
		module, pkg := t.module(filepath.Dir(m.file))
		if out, err := t.command(ctx, "go", "list", "-C", module, "-export", "-tags", m.tags, pkg); err != nil {
			if ctx.Err() != nil {
				return cutShort, ""
			}
			return noCompile, out
		}
	}
	out, err := t.test(ctx, m)
	switch {
	case ctx.Err() != nil:
		return cutShort, ""
	case err == nil:
		return survived, m.pkg + " " + strings.Join(m.tests, " ") + " passes with it"
	case strings.Contains(out, "[build failed]") || strings.Contains(out, "[setup failed]") ||
		strings.Contains(out, "go build: exit status"):
		return noCompile, out
	}
	return noticed, ""
}

// trusted runs the mutant's test once without the mutant.
func (t *tree) trusted(ctx context.Context, m mutant) error {
	key := m.pkg + " " + strings.Join(m.tests, " ") + " " + m.tags
	if err, known := t.good[key]; known {
		return err
	}
	out, err := t.test(ctx, m)
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", key, err, lastLines(out))
	} else {
		for _, f := range m.functions() {
			if !regexp.MustCompile(`(?m)^--- PASS: ` + f + ` `).MatchString(out) {
				err = fmt.Errorf("%s: %s did not run and pass\n%s", key, f, lastLines(out))
			}
		}
	}
	if ctx.Err() == nil {
		t.good[key] = err
	}
	return err
}

func lastLines(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// test runs the mutant's tests alone, and removes what they leave.
func (t *tree) test(ctx context.Context, m mutant) (string, error) {
	var out strings.Builder
	var errs []error
	for _, name := range m.tests {
		parts := strings.Split(name, "/")
		for i, p := range parts {
			parts[i] = "^(" + regexp.QuoteMeta(p) + ")$"
		}
		module, pkg := t.module(m.pkg)
		// As in make test: what runs beside it does not hold its mounts, and a file system that it leaves frozen is thawed.
		alone := filepath.Join(t.root, "scripts/own-mounts.sh")
		said, err := t.command(ctx, "go", "test", "-C", module, "-exec", alone, "-v", "-vet=off", "-count=1", "-tags", m.tags,
			"-timeout", t.o.timeout.String(), "-run", strings.Join(parts, "/"), pkg)
		out.WriteString(said)
		errs = append(errs, err)
		t.cleanUp()
	}
	return out.String(), errors.Join(errs...)
}

// module returns the directory of a package's module, and the package's pattern there.
func (t *tree) module(pkg string) (dir, pattern string) {
	pkg = filepath.Clean(pkg)
	for dir = pkg; dir != "."; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(t.root, dir, "go.mod")); err == nil {
			return dir, "./" + strings.TrimPrefix(strings.TrimPrefix(pkg, dir), "/")
		}
	}
	return dir, "./" + pkg
}

// command runs a program in the tree. All its children are in its process group, or have its
// TMPDIR.
func (t *tree) command(ctx context.Context, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = t.root
	c.Env = append(os.Environ(), "TMPDIR="+t.tmp, "CRUST_TEST_BUILDS=") // its programs are built of this tree
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.WaitDelay = 10 * time.Second
	out, err := c.CombinedOutput()
	return string(out), err
}

// cleanUp removes what a failed test has left: processes whose environment names this tree's
// TMPDIR, and mounts and loop devices beneath it.
func (t *tree) cleanUp() {
	environments, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, e := range environments {
		b, err := os.ReadFile(e)
		if err != nil || !bytes.Contains(b, []byte("TMPDIR="+t.tmp)) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(e, "/proc/%d/", &pid); err == nil && pid != os.Getpid() {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	lines := strings.Split(string(mounts), "\n")
	for _, line := range slices.Backward(lines) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], t.dir+"/") {
			_ = syscall.Unmount(f[4], syscall.MNT_DETACH)
		}
	}
	for _, l := range slices.Backward(t.loops()) {
		_ = exec.Command("losetup", "-d", l).Run() // one in use is released by its user
	}
	entries, _ := os.ReadDir(t.tmp)
	for _, e := range entries {
		removeTree(filepath.Join(t.tmp, e.Name()))
	}
}

// loops returns the loop devices over files beneath TMPDIR, then those over file systems on them,
// or over themselves.
func (t *tree) loops() []string {
	out, _ := exec.Command("losetup", "-l", "-n", "-O", "NAME,MAJ:MIN,BACK-MAJ:MIN,BACK-FILE").Output()
	var names []string
	ours := map[string]bool{} // names and numbers
	for more := true; more; {
		more = false
		for line := range strings.Lines(string(out)) {
			f := strings.Fields(line)
			if len(f) < 4 || ours[f[0]] || !strings.HasPrefix(f[3], t.tmp+"/") && !ours[f[2]] && !ours[f[3]] &&
				!ours["/dev"+f[3]] { // of a test whose mounts have ended with it (own-mounts.sh)
				continue
			}
			ours[f[0]], ours[f[1]], more = true, true, true
			names = append(names, f[0])
		}
	}
	return names
}

func (t *tree) remove() {
	t.cleanUp()
	removeTree(t.dir)
}

// removeTree never enters another file system.
func removeTree(path string) {
	if out, err := exec.Command("rm", "-rf", "--one-file-system", path).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "mutants: %v: %s\n", err, out)
	}
}
