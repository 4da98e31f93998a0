package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// published is what the kernel, and the volume itself, say of a target.
type published struct {
	Path      string `json:"path"`
	Source    string `json:"source"`
	Type      string `json:"type"`
	Options   string `json:"options"` // of the superblock
	ReadOnly  bool   `json:"readOnly"`
	Shown     string `json:"shownGroup"` // of the root, as processes see it
	Recorded  string `json:"recordedOwnership"`
	Label     string `json:"seLinuxLabel,omitempty"`
	BlockNode bool   `json:"blockDevice,omitempty"`
}

func showCommand(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "show PATH", Short: "Show how a volume is mounted at a path: group, label, read-only-ness. Asks the kernel, not the driver",
		Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			p, err := lookAt(g.kubeletDir, args[0])
			if err != nil {
				return err
			}
			t := table{head: []string{"WHAT", ""}}
			add := func(what string, value any) { t.rows = append(t.rows, []string{what, fmt.Sprint(value)}) }
			add("source", p.Source)
			add("type", p.Type)
			add("superblock options", p.Options)
			add("read-only", p.ReadOnly)
			if !p.BlockNode {
				add("group of the root", p.Shown)
				add("recorded ownership", p.Recorded)
			}
			if p.Label != "" {
				add("SELinux label", p.Label)
			}
			return g.print(cmd.OutOrStdout(), t, p)
		},
	}
}

func lookAt(kubeletDir, path string) (published, error) {
	p := published{Path: path, Recorded: "none"}
	root, err := mounter.OpenRoot(kubeletDir)
	if err != nil {
		return p, err
	}
	defer root.Close()
	target, err := root.Target(path)
	if err != nil {
		return p, err
	}
	defer target.Close()
	s, err := target.Look()
	if err != nil {
		return p, err
	}
	defer s.Close()
	if s.Occupant != mounter.MountPoint {
		return p, fmt.Errorf("%s: nothing is mounted there", path)
	}
	m, err := s.Mount()
	if err != nil {
		return p, err
	}
	p.Source, p.Type, p.Options, p.ReadOnly, p.BlockNode = m.Source, m.Type, m.Options, m.ReadOnly, s.IsBlock()
	if p.BlockNode {
		return p, nil
	}
	dir, err := s.Dir()
	if err != nil {
		return p, err
	}
	defer dir.Close()
	p.Shown = fmt.Sprint(s.Group())
	if r, ok, err := ownership.State(dir); err != nil {
		p.Recorded = err.Error()
	} else if ok {
		p.Recorded = r.String()
	}
	p.Label, err = s.Label()
	return p, err
}
