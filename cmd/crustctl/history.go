package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/audit"
)

func historyCommand(g *globals) *cobra.Command {
	var stateDir, volume string
	var since time.Duration
	c := &cobra.Command{
		Use: "history", Short: "Show what the driver of this node did to volumes: the audit log, over restarts",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			events, torn, err := audit.Read(stateDir)
			if err != nil {
				return fmt.Errorf("--state-dir: %w", err)
			}
			if len(events) == 0 {
				return fmt.Errorf("--state-dir %s: there is no audit log; give the one that csi-node was started with", stateDir)
			}
			if torn > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "crustctl: %d torn lines are left out; a crash of the machine tears the last line\n", torn)
			}
			shown := []audit.Event{}
			t := table{head: []string{"TIME", "ACTION", "OUTCOME", "VOLUME", "WHAT", "ASKED BY"}}
			for _, e := range events {
				if volume != "" && e.Volume != volume && e.Name != volume && e.Source != volume || since > 0 && time.Since(e.Time) > since {
					continue
				}
				shown = append(shown, e)
				t.rows = append(t.rows, []string{e.Time.Local().Format(time.DateTime), string(e.Action), outcome(e), e.Volume, what(e), askedBy(e)})
			}
			return g.print(cmd.OutOrStdout(), t, shown)
		},
	}
	c.Flags().StringVar(&stateDir, "state-dir", "/var/lib/csi-node", "the driver's --state-dir")
	c.Flags().StringVar(&volume, "volume", "", "of this volume only, by id or name; also what was copied from it")
	c.Flags().DurationVar(&since, "since", 0, "not older than this, for example 1h (default: all that is kept)")
	return c
}

func outcome(e audit.Event) string {
	if e.Code != "" {
		return string(e.Outcome) + " (" + e.Code + ")"
	}
	return string(e.Outcome)
}

// what gives the facts of an event that fit a line.
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
