package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
)

func historyCommand(g *globals) *cobra.Command {
	var f historyFilter
	var stateDir string
	c := &cobra.Command{
		Use: "history", Short: "Show what the driver of this node did to volumes: the audit log, over restarts",
		Example: "  crustctl history --claim shop/orders\n  crustctl history --volume ID --since 1h -o json",
		Args:    cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			running := "" // where csi-node has its log
			if stateDir == "" {
				d, _ := lookAtDaemon(g.endpoint) // csi-node may be down
				running = d.flag("state-dir")
				stateDir = cmp.Or(running, defaultStateDir)
			}
			events, torn, err := audit.Read(stateDir)
			if err != nil {
				return fmt.Errorf("--state-dir: %w", err)
			}
			if len(events) == 0 && running == "" {
				return fmt.Errorf("--state-dir %s: there is no audit log; give the one that csi-node was started with", stateDir)
			}
			if torn > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "crustctl: %d torn lines are left out; a crash of the machine tears the last line\n", torn)
			}
			if f.claim != "" && !strings.Contains(f.claim, "/") {
				return fmt.Errorf("--claim %s: give NAMESPACE/NAME", f.claim)
			}
			if f.since < 0 {
				return fmt.Errorf("--since %s: give how long ago, for example 1h", f.since)
			}
			shown := f.apply(events, time.Now(), func() []*inventory.Volume { return g.knownVolumes(cmd.Context()) })
			switch {
			case len(events) == 0:
				fmt.Fprintln(cmd.ErrOrStderr(), "crustctl: csi-node has done nothing yet")
			case len(shown) == 0:
				fmt.Fprintf(cmd.ErrOrStderr(), "crustctl: none of the %d events that are kept, since %s, is asked for\n", len(events),
					events[0].Time.Local().Format(time.DateTime))
			}
			t := table{head: []string{"TIME", "ACTION", "OUTCOME", "VOLUME", "WHAT", "ASKED BY"}}
			for _, e := range shown {
				t.rows = append(t.rows, []string{e.Time.Local().Format(time.DateTime), string(e.Action), outcome(e),
					cmp.Or(e.Volume, "-"), what(e),
					askedBy(e)})
			}
			return g.print(cmd.OutOrStdout(), t, shown)
		},
	}
	c.Flags().StringVar(&stateDir, "state-dir", "", "the driver's --state-dir (default: as it was started with, or "+defaultStateDir+")")
	c.Flags().StringVar(&f.volume, "volume", "", "of this volume only, by id or name; also what was copied from it")
	c.Flags().StringVar(&f.claim, "claim", "", "of the volumes made for this claim only, NAMESPACE/NAME; also what was copied from them")
	c.Flags().DurationVar(&f.since, "since", 0, "not older than this, for example 1h (default: all that is kept)")
	return c
}

// historyFilter selects the events to show.
type historyFilter struct {
	volume, claim string
	since         time.Duration
}

// apply returns the selected events. Only the event of a volume's creation has its name and claim.
// If the log no longer has that event, the driver knows them, provided the volume still exists.
func (f historyFilter) apply(events []audit.Event, now time.Time, known func() []*inventory.Volume) []audit.Event {
	all := f.volume == "" && f.claim == ""
	of := map[string]bool{} // ids of volumes, and of their snapshots
	if !all {
		if f.claim == "" {
			of[f.volume] = true
		}
		asked := func(id, name, claim string) bool {
			return (f.volume == "" || f.volume == name || f.volume == id) && (f.claim == "" || f.claim == claim)
		}
		for _, v := range known() {
			if asked(v.GetId(), v.GetName(), v.GetClaim()) {
				of[v.GetId()] = true
			}
		}
		for _, e := range events {
			if e.Action == audit.Created && asked(e.Volume, e.Name, e.Claim) {
				of[e.Volume] = true
			}
			if e.Snapshot != "" && of[e.Volume] {
				of[e.Snapshot] = true
			}
		}
	}
	shown := []audit.Event{}
	for _, e := range events {
		if f.since > 0 && now.Sub(e.Time) > f.since {
			continue
		}
		if all || of[e.Volume] || e.Source != "" && of[e.Source] || e.Snapshot != "" && of[e.Snapshot] {
			shown = append(shown, e)
		}
	}
	return shown
}

// knownVolumes returns the driver's volumes, nil if it does not answer.
func (g *globals) knownVolumes(ctx context.Context) []*inventory.Volume {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := csiclient.Dial(g.endpoint, g.kubeletDir)
	if err != nil {
		return nil
	}
	defer c.Close()
	volumes, _ := c.Volumes(ctx) // the log alone is enough
	return volumes
}

func outcome(e audit.Event) string {
	if e.Code != "" {
		return string(e.Outcome) + " (" + e.Code + ")"
	}
	return string(e.Outcome)
}

// what returns the facts of an event that fit on a line.
func what(e audit.Event) string {
	s := ""
	add := func(format, value string) {
		if value != "" {
			if s != "" {
				s += ", "
			}
			s += fmt.Sprintf(format, value)
		}
	}
	add("%s", e.Name)
	add("%s", e.FSType)
	if e.Bytes > 0 {
		add("%s bytes", fmt.Sprint(e.Bytes))
	}
	add("%s", e.Result)
	add("%s", e.Access)
	add("from %s", e.Source)
	add("snapshot %s", e.Snapshot)
	add("pod %s", e.Pod)
	add("claim %s", e.Claim)
	if e.Pod == "" {
		add("at %s", e.Target)
	}
	return s
}

func askedBy(e audit.Event) string {
	if e.Method == "" {
		return "the driver"
	}
	return fmt.Sprintf("%s of pid %d", e.Method, e.PID)
}
