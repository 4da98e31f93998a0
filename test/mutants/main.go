// Command mutants breaks the code on purpose, one line at a time, and checks that the test that
// guards the line notices.
//
//	go run ./test/mutants                       all mutants of test/mutants/list/*.txt
//	go run ./test/mutants -run 'A04|D05'        those with such names
//	go run ./test/mutants -changed origin/main  those whose file or record changed, and some others
//
// Each runs in a copy of the tree. The command fails if a mutant survives, does not apply or does
// not compile, or if a test fails without a mutant.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

type options struct {
	root, lists string
	run         string
	changed     string
	others, j   int
	timeout     time.Duration
	limit       time.Duration
	today       string
}

func main() {
	var o options
	flag.StringVar(&o.root, "root", ".", "the repository")
	flag.StringVar(&o.lists, "lists", "test/mutants/list", "directory of the lists, in the repository")
	flag.StringVar(&o.run, "run", "", "regular expression of names")
	flag.StringVar(&o.changed, "changed", "", "git revision: only mutants whose file or record changed since then, and -others")
	flag.IntVar(&o.others, "others", 20, "with -changed: so many of the others, drawn anew each day")
	flag.IntVar(&o.j, "j", 1, "mutants that are tried at a time, each in a copy of its own; some tests want the machine for themselves")
	flag.DurationVar(&o.timeout, "timeout", 10*time.Minute, "of one test; one that takes longer has noticed")
	flag.DurationVar(&o.limit, "for", 0, "begin no more after this time (0: no limit); with -changed, the order is drawn anew each day")
	flag.StringVar(&o.today, "day", time.Now().UTC().Format("20060102"), "seed of -others")
	flag.Parse()
	if flag.NArg() > 0 { // a name without -run would mean all mutants
		fmt.Fprintf(os.Stderr, "%q: unexpected argument; -run names mutants\n", flag.Arg(0))
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	root, err := filepath.Abs(o.root)
	if err != nil {
		return err
	}
	o.root = root
	all, err := readLists(filepath.Join(root, o.lists))
	if err != nil {
		return err
	}
	chosen, err := choose(ctx, o, all)
	if err != nil {
		return err
	}
	fmt.Printf("mutants: %d of %d\n", len(chosen), len(all))
	t, err := tryAll(ctx, o, chosen)
	if err != nil {
		return err
	}
	fmt.Println(t)
	return t.verdict()
}

// choose selects the requested mutants.
func choose(ctx context.Context, o options, all []mutant) ([]mutant, error) {
	names, err := regexp.Compile(o.run)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(slices.Clone(all), func(m mutant) bool { return !names.MatchString(m.name) })
	if o.changed == "" {
		return all, nil
	}
	files, before, err := since(ctx, o)
	if err != nil {
		return nil, err
	}
	var chosen, others []mutant
	for _, m := range all {
		if files[m.file] || !before[m.record] {
			chosen = append(chosen, m)
		} else {
			others = append(others, m)
		}
	}
	seed, err := strconv.ParseUint(o.today, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("-day %q: a number is needed", o.today)
	}
	r := rand.New(rand.NewPCG(seed, 0))
	r.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	n := min(o.others, len(others))
	fmt.Printf("mutants: %d changed since %s, and %d of %d others (-day %s)\n", len(chosen), o.changed, n, len(others), o.today)
	r.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
	return append(chosen, others[:n]...), nil
}

// since returns the files that changed since the revision, and the lists' records at that revision.
func since(ctx context.Context, o options) (files, before map[string]bool, err error) {
	files, before = map[string]bool{}, map[string]bool{}
	diff, err := git(ctx, o.root, "diff", "--name-only", "-z", "--no-renames", o.changed, "--")
	if err != nil {
		return nil, nil, err
	}
	unknown, err := git(ctx, o.root, "ls-files", "-z", "--others", "--exclude-standard")
	if err != nil {
		return nil, nil, err
	}
	for _, f := range strings.Split(diff+unknown, "\x00") {
		files[f] = true
	}
	lists, err := git(ctx, o.root, "ls-tree", "-z", "--name-only", o.changed, o.lists+"/")
	if err != nil {
		return nil, nil, err
	}
	for _, l := range strings.Split(lists, "\x00") {
		if !strings.HasSuffix(l, ".txt") {
			continue
		}
		text, err := git(ctx, o.root, "show", o.changed+":"+l)
		if err != nil {
			return nil, nil, err
		}
		old, err := parse(l, text)
		if err != nil {
			continue // then all of it is new
		}
		for _, m := range old {
			before[m.record] = true
		}
	}
	return files, before, nil
}

// totals of a run.
type totals struct {
	count    map[outcome]int
	survived []string
	broken   []string
}

func (t totals) String() string {
	var parts []string
	for _, o := range []outcome{noticed, survived, equivalent, noApply, noCompile, badTest, cutShort, notTried} {
		if n := t.count[o]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, o))
		}
	}
	if len(parts) == 0 {
		parts = []string{"none"}
	}
	return "mutants: " + strings.Join(parts, ", ")
}

func (t totals) verdict() error {
	var errs []error
	if len(t.survived) > 0 {
		errs = append(errs, fmt.Errorf("no test noticed %s", strings.Join(t.survived, ", ")))
	}
	if len(t.broken) > 0 {
		errs = append(errs, fmt.Errorf("could not be tried: %s", strings.Join(t.broken, ", ")))
	}
	if t.count[cutShort] > 0 {
		errs = append(errs, fmt.Errorf("%d were cut short", t.count[cutShort]))
	}
	return errors.Join(errs...)
}
