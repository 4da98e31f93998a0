package main

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// published is what the kernel and the volume itself report about a target.
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
		Use:   "show VOLUME|PATH",
		Short: "Show a volume and who uses it, by id, name or claim (NAMESPACE/NAME); or a mount, by absolute path",
		Args:  cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			if filepath.IsAbs(args[0]) { // asks the kernel, not the driver
				p, err := g.lookAt(args[0])
				if err != nil {
					return err
				}
				t := table{head: []string{"WHAT", ""}}
				p.addTo(&t)
				return g.print(cmd.OutOrStdout(), t, p)
			}
			return g.with(cmd, func(ctx context.Context, c *csiclient.Client) error { return g.showVolume(ctx, cmd, c, args[0]) })
		},
	}
}

func (p published) addTo(t *table) {
	t.add("source", p.Source)
	if !p.BlockNode {
		t.add("type", p.Type)
		t.add("superblock options", p.Options)
	}
	t.add("read-only", p.ReadOnly)
	if !p.BlockNode {
		t.add("group of the root", p.Shown)
		t.add("recorded ownership", p.Recorded)
	}
	if p.Label != "" {
		t.add("SELinux label", p.Label)
	}
}

func (t *table) add(what string, value any) {
	t.rows = append(t.rows, []string{what, fmt.Sprint(value)})
}

// showVolume shows all volumes with this id, name or claim. Successive claims of the same name may
// have left several.
func (g *globals) showVolume(ctx context.Context, cmd *cobra.Command, c *csiclient.Client, name string) error {
	all, err := c.Volumes(ctx)
	if err != nil {
		return err
	}
	t := table{head: []string{"WHAT", ""}}
	type whole struct {
		Volume *inventory.Volume `json:"volume"`
		Mounts []published       `json:"mounts"`
	}
	data := []whole{}
	for _, v := range all {
		if v.GetId() != name && v.GetName() != name && v.GetClaim() != name {
			continue
		}
		w := whole{Volume: v, Mounts: []published{}}
		t.add("volume", v.GetId())
		t.add("name", cmp.Or(v.GetName(), "-"))
		t.add("made for claim", cmp.Or(v.GetClaim(), "-"))
		t.add("pool", cmp.Or(v.GetPool(), "-"))
		t.add("size", sizeOrNone(v.GetSize()))
		t.add("on disk", sizeOrNone(v.GetAllocated()))
		t.add("type", kind(v))
		t.add("copy of", cmp.Or(v.GetSource(), "-"))
		if v.GetCreated() != nil {
			t.add("created", v.GetCreated().AsTime().Local().Format(time.DateTime))
		}
		t.add("device", cmp.Or(v.GetDevice(), "-"))
		if len(v.GetUses()) == 0 {
			t.add("used by", usedBy(v))
		}
		for _, u := range v.GetUses() {
			t.add("used by", user(u))
			t.add("at", u.GetTarget())
			if u.GetDeferred() {
				continue // a placeholder is mounted there
			}
			p, err := g.lookAt(u.GetTarget())
			if err != nil {
				t.add("mount", "cannot be read: "+err.Error())
				continue
			}
			p.addTo(&t)
			w.Mounts = append(w.Mounts, p)
		}
		data = append(data, w)
	}
	if len(data) == 0 {
		return whyNot(ctx, c, name)
	}
	return g.print(cmd.OutOrStdout(), t, data)
}

// lookAt describes the mount at a path. It does not wait for a mount that hangs.
func (g *globals) lookAt(path string) (published, error) {
	return lookWithin(&g.mounts, path, func() (published, error) { return lookAt(g.kubeletDir, path) })
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
	if p.BlockNode { // what is mounted is the node, and the file system that it is in says nothing of it
		device, _, err := s.Device()
		p.Source, p.Type, p.Options = cmp.Or(device.Path, fmt.Sprintf("%d:%d", device.Major, device.Minor)), "", ""
		return p, err
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
