package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Every argument and flag of every command has a completion, so that a shell offers file names only
// for files.
func TestB08_CompletionOffersFilesOnlyWhereOneIsMeant(t *testing.T) {
	files := map[string]bool{
		"dir": true, "state-dir": true, "kubelet-dir": true, "run-dir": true, "persistent-volumes": true, "endpoint": true,
		"crust": true, "kernel": true, "initramfs": true,
		"path": true, "user-namespace": true, "support-bundle output": true,
	}
	var look func(c *cobra.Command)
	look = func(c *cobra.Command) {
		if c.ValidArgsFunction == nil {
			t.Errorf("%s: its arguments have no completion", c.CommandPath())
		}
		_, path, _ := strings.Cut(c.CommandPath(), " ")
		for name := range flagNames(c) {
			f := c.Flag(name)
			if f.Value.Type() == "bool" || files[name] || files[path+" "+name] {
				continue
			}
			if _, ok := c.GetFlagCompletionFunc(name); !ok {
				t.Errorf("%s --%s: has no completion", c.CommandPath(), name)
			}
		}
		for _, sub := range c.Commands() {
			look(sub)
		}
	}
	look(root())
}

func flagNames(c *cobra.Command) map[string]bool {
	names := map[string]bool{}
	for _, field := range strings.Fields(c.LocalFlags().FlagUsages()) {
		if name, ok := strings.CutPrefix(field, "--"); ok && c.Flag(strings.Trim(name, "\"'`,.()")) != nil {
			names[strings.Trim(name, "\"'`,.()")] = true
		}
	}
	return names
}

func TestB08_CompletionWithoutADriverOffersNothing(t *testing.T) {
	out, err := crustctl(t, "__complete", "volume", "show", "")
	if err != nil || !strings.HasPrefix(out, ":4\n") {
		t.Errorf("%v %q", err, out)
	}
	out, err = crustctl(t, "__complete", "volume", "create", "x", "--fs-type", "")
	if err != nil || !strings.Contains(out, "ext4\n") || !strings.Contains(out, "xfs\n") {
		t.Errorf("%v %q", err, out)
	}
	out, err = crustctl(t, "__complete", "pool", "check", "--ignore", "snap")
	if err != nil || !strings.Contains(out, "\nsnapshot-alone\n") {
		t.Errorf("%v %q", err, out)
	}
}

func TestB08_CompletionIsPlain(t *testing.T) {
	if s := offer("a\nb", "\x1b[2Jpod\tx"); strings.ContainsAny(s, "\x1b\n") || strings.Count(s, "\t") != 1 {
		t.Errorf("%q", s)
	}
}
