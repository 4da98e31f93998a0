package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// completer returns the possible values of an argument or flag, each with a description. args are
// the arguments before it. A shell waits for it, so a server that does not answer yields no
// completions.
type completer func(ctx context.Context, args []string) []cobra.Completion

// patience is how long a user waits after pressing tab.
const patience = 3 * time.Second

// arguments completes the first argument with the first completer, and so on; it never offers file
// names.
func arguments(by ...completer) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) >= len(by) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), patience)
		defer cancel()
		return by[len(args)](ctx, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// value completes the value of a flag.
func value(by completer) cobra.CompletionFunc {
	first := arguments(by)
	return func(cmd *cobra.Command, _ []string, s string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return first(cmd, nil, s)
	}
}

func oneOf(words ...string) completer {
	return func(context.Context, []string) []cobra.Completion { return words }
}

func nothing(context.Context, []string) []cobra.Completion { return nil }

// offer returns one completion. Shells interpret its words, so text from outside is sanitized.
func offer(word, about string) cobra.Completion {
	return cobra.CompletionWithDesc(plain.Text(word, 256), plain.Text(about, 256))
}

func (g *globals) driver(f func(c *csiclient.Client)) {
	c, err := csiclient.Dial(cmp.Or(g.endpoint, findSocket(sockets(g.kubeletDir))), g.kubeletDir)
	if err != nil {
		return
	}
	defer c.Close()
	f(c)
}

func (g *globals) pools(ctx context.Context, _ []string) (all []cobra.Completion) {
	g.driver(func(c *csiclient.Client) {
		r, _ := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
		for _, p := range r.GetPools() {
			all = append(all, offer(p.GetName(), fmt.Sprintf("%d volumes, %s left", p.GetVolumes(), size(p.GetLeft()))))
		}
	})
	return all
}

// volumesBy returns completions for each volume.
func (g *globals) volumesBy(ctx context.Context, by func(v *inventory.Volume) []cobra.Completion) (all []cobra.Completion) {
	g.driver(func(c *csiclient.Client) {
		volumes, _ := c.Volumes(ctx)
		for _, v := range volumes {
			all = append(all, by(v)...)
		}
	})
	slices.Sort(all)
	return slices.Compact(all)
}

func (g *globals) volumeIDs(ctx context.Context, _ []string) []cobra.Completion {
	return g.volumesBy(ctx, func(v *inventory.Volume) []cobra.Completion { return []cobra.Completion{offer(v.GetId(), madeFor(v))} })
}

func (g *globals) claims(ctx context.Context, _ []string) []cobra.Completion {
	return g.volumesBy(ctx, func(v *inventory.Volume) []cobra.Completion {
		if v.GetClaim() == "" {
			return nil
		}
		return []cobra.Completion{offer(v.GetClaim(), v.GetId())}
	})
}

// names returns every name by which a volume can be given.
func (g *globals) names(ctx context.Context, args []string) []cobra.Completion {
	return append(g.claims(ctx, args), g.volumesBy(ctx, func(v *inventory.Volume) []cobra.Completion {
		both := []cobra.Completion{offer(v.GetId(), madeFor(v))}
		if v.GetName() != "" {
			both = append(both, offer(v.GetName(), v.GetId()))
		}
		return both
	})...)
}

// targets returns the paths where the volume given before is published.
func (g *globals) targets(ctx context.Context, args []string) []cobra.Completion {
	return g.volumesBy(ctx, func(v *inventory.Volume) (all []cobra.Completion) {
		for _, u := range v.GetUses() {
			if len(args) > 0 && v.GetId() == args[len(args)-1] {
				all = append(all, offer(u.GetTarget(), podOf(u)))
			}
		}
		return all
	})
}

func (g *globals) snapshots(ctx context.Context, _ []string) (all []cobra.Completion) {
	g.driver(func(c *csiclient.Client) {
		r, _ := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
		for _, e := range r.GetEntries() {
			all = append(all, offer(e.GetSnapshot().GetSnapshotId(), "of "+e.GetSnapshot().GetSourceVolumeId()))
		}
	})
	return all
}

func (g *globals) deletable(ctx context.Context, args []string) []cobra.Completion {
	return append(g.volumeIDs(ctx, args), g.snapshots(ctx, args)...)
}

func (g *globals) sandboxIDs(ctx context.Context, _ []string) (all []cobra.Completion) {
	g.eachSandbox(ctx, func(s *crustv1alpha1.Sandbox) {
		all = append(all, offer(s.GetSandboxId(), fmt.Sprintf("%s, %d volumes", s.GetKind(), len(s.GetVolumes()))))
	})
	return all
}

// inside returns the host targets of the volumes in the sandbox given first.
func (g *globals) inside(ctx context.Context, args []string) (all []cobra.Completion) {
	g.eachSandbox(ctx, func(s *crustv1alpha1.Sandbox) {
		for _, v := range s.GetVolumes() {
			if s.GetSandboxId() == args[0] {
				all = append(all, offer(v.GetHostTargetPath(), v.GetFileSystem()))
			}
		}
	})
	return all
}

func (g *globals) eachSandbox(ctx context.Context, f func(s *crustv1alpha1.Sandbox)) {
	c, err := crust.Dial(cmp.Or(g.crust, defaultCrust))
	if err != nil {
		return
	}
	defer c.Close()
	r, _ := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	for _, s := range r.GetSandboxes() {
		f(s)
	}
}

// completions maps each command to the completion of its arguments.
func (g *globals) completions() map[string]cobra.CompletionFunc {
	return map[string]cobra.CompletionFunc{
		"pool check":        arguments(g.pools),
		"volume create":     arguments(),
		"volume publish":    fileAfter(arguments(g.volumeIDs)),
		"volume unpublish":  arguments(g.volumeIDs, g.targets),
		"volume stats":      arguments(g.volumeIDs, g.targets),
		"volume show":       arguments(g.names),
		"volume expand":     arguments(g.volumeIDs),
		"volume snapshot":   arguments(g.volumeIDs),
		"volume clone":      arguments(g.volumeIDs),
		"volume delete":     arguments(g.deletable),
		"conformance":       arguments(g.sandboxIDs),
		"sandbox run":       arguments(),
		"sandbox exec":      arguments(g.sandboxIDs),
		"sandbox rm":        arguments(g.sandboxIDs),
		"sandbox publish":   fileAfter(arguments(g.sandboxIDs, g.volumeIDs)),
		"sandbox unpublish": arguments(g.sandboxIDs, g.volumeIDs, g.inside),
		"sandbox bind":      arguments(g.sandboxIDs, nothing, g.inside),
		"sandbox unbind":    arguments(g.sandboxIDs),
		"sandbox stats":     arguments(g.sandboxIDs, g.inside),
		"sandbox expand":    arguments(g.sandboxIDs, g.volumeIDs, g.inside),
	}
}

// fileAfter completes absolute paths, and anything else with by.
func fileAfter(by cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, s string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if strings.HasPrefix(s, "/") {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return by(cmd, args, s)
	}
}

// flagValues returns the completers of flags that take no paths.
func (g *globals) flagValues() map[string]completer {
	modes := make([]string, 0, len(csi.VolumeCapability_AccessMode_Mode_value))
	for name := range csi.VolumeCapability_AccessMode_Mode_value {
		modes = append(modes, name)
	}
	slices.Sort(modes)
	kinds := []string{withoutVolume, withoutPersistentVolume, ofAnotherNode, ofAnotherPool, notConfigured}
	for _, k := range volume.Kinds() {
		kinds = append(kinds, string(k))
	}
	return map[string]completer{
		"output": oneOf("table", "json"), "fs-type": oneOf(fstype.Formats()...), "access-mode": oneOf(modes...), "ignore": oneOf(kinds...),
		"pool": g.pools, "from-snapshot": g.snapshots, "claim": g.claims, "volume": g.names,
		"kind": oneOf("qemu", "namespace"), "machine": oneOf("q35", "microvm"),
		"accel": oneOf("auto", "kvm", "tcg"), "size": nothing, "node-id": nothing,
		"other": g.sandboxIDs, "driver": nothing,
		"since": oneOf("1h", "24h"), "group": nothing, "mount-option": nothing,
		"parameter": nothing, "sub-path": nothing,
		"attribute": nothing, "timeout": nothing, "interval": nothing, "memory": nothing, "pid": nothing,
	}
}

// complete installs the completions of each command and flag.
func (g *globals) complete(c *cobra.Command) error {
	by, values := g.completions(), g.flagValues()
	_, path, _ := strings.Cut(c.CommandPath(), " ")
	if f, ok := by[path]; ok {
		c.ValidArgsFunction = f
	} else {
		c.ValidArgsFunction = cobra.NoFileCompletions
	}
	for name, f := range values {
		flag := c.LocalNonPersistentFlags().Lookup(name)
		if c.PersistentFlags().Lookup(name) != nil {
			flag = c.PersistentFlags().Lookup(name)
		}
		if flag == nil || path == "support-bundle" && name == "output" { // a file
			continue
		}
		if err := c.RegisterFlagCompletionFunc(name, value(f)); err != nil {
			return err
		}
	}
	for _, name := range []string{"dir", "state-dir", "kubelet-dir", "run-dir"} {
		if c.Flags().Lookup(name) != nil || c.PersistentFlags().Lookup(name) != nil {
			_ = c.MarkFlagDirname(name)           // a flag of this command,
			_ = c.MarkPersistentFlagDirname(name) // or of those below it
		}
	}
	for _, sub := range c.Commands() {
		if err := g.complete(sub); err != nil {
			return err
		}
	}
	return nil
}
