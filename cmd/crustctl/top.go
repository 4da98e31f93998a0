package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/term"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// view is what `top` shows at one moment.
type view struct {
	Node    string            `json:"node"`
	Time    time.Time         `json:"time"`
	Pools   []*inventory.Pool `json:"pools"`
	Volumes []busyVolume      `json:"volumes"` // the fullest first
}

// busyVolume is one line. Used and Total are those of the file system if one is mounted, otherwise
// the space that the volume takes in its pool, and its size.
type busyVolume struct {
	ID        string   `json:"id"`
	For       string   `json:"for"`
	Pool      string   `json:"pool,omitempty"`
	Type      string   `json:"type"`
	Used      int64    `json:"used"`
	Total     int64    `json:"total"`
	Allocated int64    `json:"allocated"`
	Users     []string `json:"users,omitempty"`
	Groups    []string `json:"groups,omitempty"`
	Labels    []string `json:"labels,omitempty"`
	Deferred  bool     `json:"deferred,omitempty"`
	Sandboxes []string `json:"sandboxes,omitempty"`
	Trouble   string   `json:"trouble,omitempty"`
}

func topCommand(g *globals) *cobra.Command {
	var once bool
	var every time.Duration
	c := &cobra.Command{
		Use: "top", Short: "Show pools and volumes by use, with pods, fill, groups, labels and sandboxes, and refresh it",
		Long: "Show pools, and volumes by use, until it is interrupted. If the output is no terminal, or with --once or -o json, it is " +
			"shown once.\n" +
			"FILL is that of the file system; of volumes that this node does not mount, what they take of their pool.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			const least = 100 * time.Millisecond
			if every < least {
				return fmt.Errorf("--interval %s: give %s or more", every, least)
			}
			out, ok := cmd.OutOrStdout().(*os.File)
			if once || g.output == "json" || !ok || !term.IsTerminal(int(out.Fd())) {
				v, err := g.look(cmd.Context())
				if err != nil {
					return err
				}
				return g.printView(cmd.OutOrStdout(), v)
			}
			for tick := time.NewTicker(every); ; {
				if err := g.refresh(cmd.Context(), out); err != nil {
					return err
				}
				select {
				case <-cmd.Context().Done():
					tick.Stop()
					return nil
				case <-tick.C:
				}
			}
		},
	}
	c.Flags().BoolVar(&once, "once", false, "show it once")
	c.Flags().DurationVar(&every, "interval", 2*time.Second, "how often it is refreshed")
	c.Flags().StringVar(&g.crust, "crust", defaultCrust, "CRUST socket, where there is one")
	return c
}

// refresh draws one screen. A driver that does not answer is shown as such: it may come back.
func (g *globals) refresh(ctx context.Context, out *os.File) error {
	var b bytes.Buffer
	v, err := g.look(ctx)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		fmt.Fprintln(&b, time.Now().Format(time.TimeOnly), plain.Text(explain(err), 1<<12))
	default:
		if err := g.printView(&b, v); err != nil {
			return err
		}
	}
	columns, lines, err := term.GetSize(int(out.Fd()))
	if err != nil {
		columns, lines = 0, 0
	}
	_, err = io.WriteString(out, screen(b.String(), columns, lines))
	return err
}

// screen formats text to replace what a terminal shows: home, clear each line to its end, then the
// rest. 0 columns or lines: unlimited.
func screen(text string, columns, lines int) string {
	all := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if more := len(all) - lines + 1; lines > 1 && len(all) > lines {
		all = append(all[:lines-1], fmt.Sprintf("... %d lines more", more))
	}
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, line := range all {
		if columns > 0 && utf8.RuneCountInString(line) > columns {
			line = string([]rune(line)[:columns])
		}
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(line + "\x1b[K")
	}
	return b.String() + "\x1b[J"
}

func (g *globals) look(ctx context.Context) (*view, error) {
	ctx, cancel := context.WithTimeout(ctx, g.timeout)
	defer cancel()
	c, err := csiclient.Dial(g.endpoint, g.kubeletDir)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	info, err := c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return nil, err
	}
	pools, err := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
	if err != nil {
		return nil, err
	}
	volumes, err := c.Volumes(ctx)
	if err != nil {
		return nil, err
	}
	sandboxes := g.sandboxByTarget(ctx)
	v := &view{Node: info.GetNodeId(), Time: time.Now(), Pools: pools.GetPools(), Volumes: make([]busyVolume, len(volumes))}
	var asked errgroup.Group
	asked.SetLimit(8) // hung calls delay few others
	for i, vol := range volumes {
		asked.Go(func() error {
			v.Volumes[i] = g.busy(ctx, c, vol, sandboxes)
			return nil
		})
	}
	_ = asked.Wait() // none returns an error
	slices.SortStableFunc(v.Volumes, func(a, b busyVolume) int { return cmp.Compare(b.Used, a.Used) })
	return v, nil
}

func (g *globals) busy(ctx context.Context, c *csiclient.Client, v *inventory.Volume, sandboxes map[string]string) busyVolume {
	b := busyVolume{ID: v.GetId(), For: madeFor(v), Pool: v.GetPool(), Type: kind(v), Used: v.GetAllocated(), Total: v.GetSize(),
		Allocated: v.GetAllocated()}
	add := func(list *[]string, s string) {
		if s != "" && !slices.Contains(*list, s) {
			*list = append(*list, s)
		}
	}
	measured := false
	for _, u := range v.GetUses() {
		add(&b.Users, user(u))
		add(&b.Sandboxes, sandboxes[u.GetTarget()])
		if u.GetDeferred() {
			b.Deferred = true
			continue // a placeholder is mounted there
		}
		p, err := g.lookAt(u.GetTarget())
		if err != nil {
			b.Trouble = err.Error()
			continue
		}
		add(&b.Labels, p.Label)
		if p.BlockNode {
			continue
		}
		add(&b.Groups, p.Shown)
		if !measured {
			measured = b.measure(ctx, c, u.GetTarget())
		}
	}
	if len(b.Users) == 0 && v.GetStaged() {
		add(&b.Users, usedBy(v))
	}
	return b
}

// measure asks how full the file system is. It does not wait for one that hangs.
func (b *busyVolume) measure(ctx context.Context, c *csiclient.Client, target string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	s, err := c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: b.ID, VolumePath: target})
	if err != nil {
		b.Trouble = explain(err)
		return false
	}
	for _, u := range s.GetUsage() {
		if u.GetUnit() == csi.VolumeUsage_BYTES {
			b.Used, b.Total = u.GetUsed(), u.GetTotal()
			return true
		}
	}
	return false
}

// sandboxByTarget maps each target to the sandbox that has its volume; empty without a CRUST
// server.
func (g *globals) sandboxByTarget(ctx context.Context) map[string]string {
	if _, err := os.Stat(strings.TrimPrefix(g.crust, "unix://")); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c, err := crust.Dial(g.crust)
	if err != nil {
		return nil
	}
	defer c.Close()
	r, err := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	if err != nil {
		return nil
	}
	by := map[string]string{}
	for _, s := range r.GetSandboxes() {
		for _, v := range s.GetVolumes() {
			by[v.GetHostTargetPath()] = s.GetSandboxId()
		}
	}
	return by
}

func (g *globals) printView(w io.Writer, v *view) error {
	if g.output == "json" {
		return g.print(w, table{}, v)
	}
	fmt.Fprintf(w, "node %s, %s\n\n", plain.Text(v.Node, 256), v.Time.Format(time.TimeOnly))
	if err := g.print(w, poolTable(v.Pools), nil); err != nil {
		return err
	}
	fmt.Fprintln(w)
	t := table{head: []string{"VOLUME", "POOL", "USED", "OF", "FILL", "ON DISK", "TYPE", "USED BY", "GROUP", "LABEL", "SANDBOX"}}
	list := func(l []string) string { return cmp.Or(strings.Join(l, ", "), "-") }
	for _, b := range v.Volumes {
		fill := "-"
		if b.Total > 0 {
			fill = fmt.Sprintf("%d%%", (b.Used*100+b.Total/2)/b.Total)
		}
		users := list(b.Users)
		if b.Trouble != "" {
			users += " (" + b.Trouble + ")"
		}
		t.rows = append(t.rows, []string{b.For, cmp.Or(b.Pool, "-"), sizeOrNone(b.Used), sizeOrNone(b.Total), fill, sizeOrNone(b.Allocated),
			b.Type,
			users, list(b.Groups), list(b.Labels), list(b.Sandboxes)})
	}
	return g.print(w, t, nil)
}
