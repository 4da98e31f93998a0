package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
)

// misfit is one line of `pool check`.
type misfit struct {
	Pool  string `json:"pool"`
	Kind  string `json:"kind"`
	ID    string `json:"id,omitempty"`
	Claim string `json:"claim,omitempty"`
	Path  string `json:"path,omitempty"`
	Means string `json:"means"`
	Do    string `json:"do"`
}

// checkedPools holds what was checked, and the results.
type checkedPools struct {
	Pools    []string `json:"pools"`
	Findings []misfit `json:"findings"`

	driver, node string // empty if unknown
	volumes      []*inventory.Volume
	failed       []error // pools that could not be checked
}

type checkFlags struct {
	dir, node, persistentVolumes string
	ignore                       []string
}

func poolCheck(g *globals) *cobra.Command {
	var f checkFlags
	c := &cobra.Command{
		Use: "check [POOL]", Short: "Tell what in the pools does not fit together: files, records, devices, PersistentVolumes",
		Long: "Tell what in the pools does not fit together, and change nothing. csi-node does the looking, and leaves out what it has " +
			"under way.\n" +
			"Without csi-node, --dir reads a pool's files; what is staged cannot be told then.\n" +
			"The exit code is 0 if nothing was found, 1 if something was, 2 if a pool could not be looked at.",
		Example: "  crustctl pool check\n  kubectl get pv -o json | crustctl pool check --persistent-volumes -\n  crustctl pool check " +
			"default --dir /var/lib/crust-csi/pool",
		Args: cobra.MaximumNArgs(1), Annotations: map[string]string{looks: "yes"},
		RunE: func(cmd *cobra.Command, args []string) error {
			pool := strings.Join(args, "")
			// Before csi-node is asked: the list must not be newer than the volumes.
			var list []persistentVolume
			if f.persistentVolumes != "" {
				var err error
				if list, err = readPersistentVolumes(cmd.InOrStdin(), f.persistentVolumes); err != nil {
					return err
				}
			}
			look := g.askForCheck
			if f.dir != "" {
				look = f.readFiles
			}
			found, err := look(cmd, pool)
			if err != nil {
				return err
			}
			if f.persistentVolumes != "" {
				found.node = cmp.Or(f.node, found.node)
				if err := found.compare(list, pool == ""); err != nil {
					return err
				}
			}
			return g.printCheck(cmd, found, f.ignore)
		},
	}
	c.Flags().StringVar(&f.persistentVolumes, "persistent-volumes", "",
		"compare with these: a file with the output of `kubectl get pv -o json`, or - for standard input")
	c.Flags().StringVar(&f.dir, "dir", "", "read the files of POOL in this directory, without csi-node")
	c.Flags().StringVar(&f.node, "node-id", "", "csi-node's --node-id, with --dir and --persistent-volumes (default: what csi-node says)")
	c.Flags().StringSliceVar(&f.ignore, "ignore", nil, "leave out findings of this KIND, for example snapshot-alone; repeatable")
	return c
}

func (g *globals) printCheck(cmd *cobra.Command, c *checkedPools, ignore []string) error {
	c.Findings = slices.DeleteFunc(c.Findings, func(m misfit) bool { return slices.Contains(ignore, m.Kind) })
	t := table{head: []string{"POOL", "KIND", "OF", "WHAT IT MEANS", "WHAT TO DO"}}
	for _, m := range c.Findings {
		of := cmp.Or(m.Path, m.ID)
		if m.Claim != "" {
			of = m.Claim + " (" + of + ")"
		}
		t.rows = append(t.rows, []string{m.Pool, m.Kind, of, m.Means, m.Do})
	}
	if len(c.Findings) == 0 && g.output == "table" {
		if len(c.Pools) > 0 {
			fmt.Fprintf(cmd.OutOrStdout(), "nothing found in %s\n", strings.Join(c.Pools, ", "))
		}
	} else if err := g.print(cmd.OutOrStdout(), t, c); err != nil {
		return err
	}
	switch {
	case len(c.failed) > 0:
		return errors.Join(c.failed...)
	case len(c.Findings) > 0:
		return found(len(c.Findings))
	}
	return nil
}

// askForCheck has csi-node do the check.
func (g *globals) askForCheck(cmd *cobra.Command, pool string) (*checkedPools, error) {
	out := &checkedPools{Pools: []string{}, Findings: []misfit{}}
	err := g.with(cmd, func(ctx context.Context, c *csiclient.Client) error {
		info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		if err != nil {
			return err
		}
		node, err := c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		if err != nil {
			return err
		}
		out.driver, out.node = info.GetName(), node.GetNodeId()
		r, err := c.CheckPools(ctx, &inventory.CheckPoolsRequest{Pool: pool})
		if err != nil {
			return err
		}
		if out.volumes, err = c.Volumes(ctx); err != nil {
			return err
		}
		pools, err := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
		if err != nil {
			return err
		}
		for _, p := range pools.GetFormer() {
			if pool == "" {
				out.Findings = append(out.Findings, misfit{Pool: p.GetName(), Kind: notConfigured, Path: p.GetDirectory(),
					Means: formerPoolMeans(p), Do: formerPoolDo(p)})
			}
		}
		for _, p := range r.GetPools() {
			if p.GetTrouble() != "" {
				out.failed = append(out.failed, fmt.Errorf("pool %s could not be looked at: %s", p.GetName(), p.GetTrouble()))
				continue
			}
			out.Pools = append(out.Pools, p.GetName())
			for _, f := range p.GetFindings() {
				out.Findings = append(out.Findings, misfit{
					Pool: p.GetName(), Kind: f.GetKind(), ID: f.GetId(), Claim: claimIn(out.volumes,
						f.GetId()), Path: f.GetPath(), Means: f.GetMeans(), Do: f.GetDo(),
				})
			}
		}
		return nil
	})
	if status.Code(err) == codes.Unavailable {
		err = fmt.Errorf("%w; without csi-node: crustctl pool check POOL --dir DIRECTORY", err)
	}
	return out, err
}

func claimIn(all []*inventory.Volume, id string) string {
	for _, v := range all {
		if v.GetId() == id {
			return v.GetClaim()
		}
	}
	return ""
}

// readFiles checks without csi-node.
func (f *checkFlags) readFiles(cmd *cobra.Command, pool string) (*checkedPools, error) {
	if pool == "" {
		return nil, errors.New("--dir: say which pool it is: crustctl pool check POOL --dir DIRECTORY")
	}
	if _, err := os.Stat(f.dir); err != nil {
		return nil, fmt.Errorf("--dir: %w", err)
	}
	c, err := looppool.CheckDir(pool, f.dir)
	if err != nil {
		return nil, fmt.Errorf("--dir: %w", err)
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "crustctl: only files were looked at: which volumes are staged is not known, and what a running "+
		"csi-node has under way may be among the findings")
	out := &checkedPools{Pools: []string{pool}, Findings: []misfit{}}
	for _, v := range c.Volumes {
		out.volumes = append(out.volumes, &inventory.Volume{Id: v.ID, Name: v.Name, Claim: inventory.ClaimOf(v.Parameters), Pool: pool})
	}
	for _, m := range c.Findings {
		out.Findings = append(out.Findings, misfit{
			Pool: pool, Kind: string(m.Kind), ID: m.ID, Claim: claimIn(out.volumes, m.ID), Path: m.Path, Means: m.Means, Do: m.Do,
		})
	}
	return out, nil
}
