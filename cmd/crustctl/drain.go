package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// obstacle is one line of `node drain-check`.
type obstacle struct {
	Kind  string   `json:"kind"`
	ID    string   `json:"id,omitempty"`
	Claim string   `json:"claim,omitempty"`
	Pods  []string `json:"pods,omitempty"`
	Means string   `json:"means"`
	Do    string   `json:"do"`
}

// drained is what a drain or a removal of the node affects.
type drained struct {
	Node     string     `json:"node"`
	Remove   bool       `json:"remove"`
	Findings []obstacle `json:"findings"`
	// What stays on the node's disks.
	Volumes   int `json:"volumes"`
	Snapshots int `json:"snapshots"`
	// Sandboxes is empty if a CRUST server was asked; otherwise it gives the reason.
	Sandboxes string `json:"sandboxes,omitempty"`

	failed []error
}

func nodeCommand(g *globals) *cobra.Command {
	c := group("node", "Look at this node as a whole")
	c.AddCommand(drainCheck(g))
	return c
}

func drainCheck(g *globals) *cobra.Command {
	d := drained{Findings: []obstacle{}}
	c := &cobra.Command{
		Use: "drain-check", Short: "Tell what a drain of this node waits for, or what its removal would lose",
		Long: "Tell what keeps this node from a reboot: volumes that pods have, sandboxes, operations under way. Volumes stay on its disks " +
			"and are back after it.\n" +
			"With --remove, tell what is lost if the node goes for good: volumes and snapshots of its pools exist nowhere else. docs/nodes.md " +
			"has the procedures.\n" +
			"Nothing is changed. The exit code is 0 if there is nothing, 1 if there is something, 2 if not everything could be looked at.",
		Args: cobra.NoArgs, Annotations: map[string]string{looks: "yes"},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := g.with(cmd, func(ctx context.Context, c *csiclient.Client) error { return d.ask(ctx, c) }); err != nil {
				return err
			}
			if err := g.sandboxesOf(cmd, &d); err != nil {
				return err
			}
			return g.printDrained(cmd, &d)
		},
	}
	c.Flags().BoolVar(&d.Remove, "remove", false, "the node is to be removed for good, with its disks")
	c.Flags().StringVar(&g.crust, "crust", defaultCrust, "CRUST socket, where there is one")
	return c
}

func (d *drained) add(o obstacle) { d.Findings = append(d.Findings, o) }

func (d *drained) ask(ctx context.Context, c *csiclient.Client) error {
	info, err := c.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return err
	}
	d.Node = info.GetNodeId()
	pools, err := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
	if err != nil {
		return err
	}
	for _, p := range pools.GetPools() {
		if p.GetTrouble() != "" {
			d.failed = append(d.failed, fmt.Errorf("what is in pool %s cannot be told: %s", p.GetName(), p.GetTrouble()))
		}
	}
	for _, p := range pools.GetFormer() {
		if d.Remove {
			d.add(obstacle{Kind: notConfigured, ID: p.GetName(), Means: formerPoolMeans(p), Do: formerPoolDo(p)})
		}
	}
	volumes, err := c.Volumes(ctx)
	if err != nil {
		return err
	}
	for _, v := range volumes {
		d.volume(v)
	}
	snapshots, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	if err != nil {
		return err
	}
	for _, e := range snapshots.GetEntries() {
		d.snapshot(e.GetSnapshot(), claimIn(volumes, e.GetSnapshot().GetSourceVolumeId()))
	}
	if d.Remove {
		if err := d.unknown(ctx, c); err != nil {
			return err
		}
	}
	running, err := c.DescribeOperations(ctx, &inventory.DescribeOperationsRequest{})
	if err != nil {
		return err
	}
	for _, o := range running.GetOperations() {
		means := fmt.Sprintf("%s runs since %s", o.GetCall(), o.GetSince().AsTime().Local().Format(time.TimeOnly))
		if o.GetProgress() != "" {
			means += " (" + o.GetProgress() + ")"
		}
		d.add(obstacle{Kind: "operation", ID: strings.Join(o.GetOn(), ", "),
			Means: means + "; until it ends, its volume can be neither unpublished nor deleted",
			Do:    "wait until it has ended; after a reboot in the middle of it, csi-node undoes or finishes it"})
	}
	return nil
}

// unknown adds what is in the pools but in no list: a volume whose record cannot be read, or a file
// without one.
func (d *drained) unknown(ctx context.Context, c *csiclient.Client) error {
	checked, err := c.CheckPools(ctx, &inventory.CheckPoolsRequest{})
	if err != nil {
		return err
	}
	for _, p := range checked.GetPools() {
		if p.GetTrouble() != "" {
			d.failed = append(d.failed, fmt.Errorf("pool %s could not be looked at: %s", p.GetName(), p.GetTrouble()))
		}
		for _, f := range p.GetFindings() {
			switch volume.Kind(f.GetKind()) {
			case volume.RecordUnusable, volume.FileWithoutRecord, volume.RecordWithoutFile, volume.UnknownFile:
				d.add(obstacle{Kind: "unknown", ID: cmp.Or(f.GetId(), f.GetPath()), Means: f.GetMeans(),
					Do: "look what it is before the node goes (crustctl pool check): " + f.GetDo()})
			}
		}
	}
	return nil
}

// volume adds the findings for a volume.
func (d *drained) volume(v *inventory.Volume) {
	o := obstacle{ID: v.GetId(), Claim: v.GetClaim()}
	pool := cmp.Or(v.GetPool(), poolGone(v))
	local := pool != ""
	if local {
		d.Volumes++
	}
	for _, u := range v.GetUses() {
		o.Pods = append(o.Pods, podOf(u))
		if u.GetDeferred() {
			d.add(obstacle{Kind: "deferral", ID: v.GetId(), Claim: v.GetClaim(), Pods: []string{podOf(u)},
				Means: "the pod's sandbox has the volume: it is taken back when the sandbox has ended",
				Do:    "drain the node; a pod without a controller has to be deleted by hand"})
		}
	}
	switch {
	case len(o.Pods) > 0:
		o.Kind = "in-use"
		o.Means = "a drain ends the pods that have it"
		o.Do = "drain the node"
		switch {
		case !local:
			o.Means += "; somebody else made this volume: its PersistentVolume says where else its pods can start"
		case d.Remove:
			o.Means += ", and they start nowhere else, because the volume lies in pool " + pool + " of this node"
			o.Do = "copy its data to a claim of another node before (docs/nodes.md), then drain"
		default:
			o.Means += "; with this claim they start on no other node, because the volume lies in pool " + pool +
				" of this one: they " +
				"are Pending until it is back"
		}
		if poolGone(v) != "" {
			o.Means += "; that pool is no longer configured"
			o.Do = "start csi-node with pool " + pool + " again, and then: " + o.Do
		}
		d.add(o)
	case v.GetStaged():
		o.Kind, o.Means = "staged", "no pod has it, and the kubelet has not unstaged it yet"
		o.Do = "wait; if it stays, look for NodeUnstageVolume in csi-node's log"
		d.add(o)
	}
	if local && d.Remove {
		d.add(obstacle{Kind: "only-here", ID: v.GetId(), Claim: v.GetClaim(),
			Means: fmt.Sprintf("volume %s (%s) exists only in pool %s of this node, and is lost with it", cmp.Or(v.GetName(), v.GetId()),
				sizeOrNone(v.GetSize()), pool),
			Do: "copy its data to a claim of another node, then delete the claim while csi-node still runs here; a retained volume: " +
				"crustctl volume delete " + v.GetId()})
	}
}

func (d *drained) snapshot(s *csi.Snapshot, claim string) {
	d.Snapshots++
	if d.Remove {
		d.add(obstacle{Kind: "snapshot-only-here", ID: s.GetSnapshotId(), Claim: claim,
			Means: "the snapshot of " + cmp.Or(claim, s.GetSourceVolumeId()) + " exists only on this node, and is lost with it",
			Do:    "restore it to a claim and copy that away, if it is needed; then delete its VolumeSnapshot while the sidecars still run here"})
	}
}

// sandboxesOf adds the sandboxes of the node's CRUST server, if it has one.
func (g *globals) sandboxesOf(cmd *cobra.Command, d *drained) error {
	if _, err := os.Stat(strings.TrimPrefix(g.crust, "unix://")); errors.Is(err, os.ErrNotExist) {
		d.Sandboxes = "no CRUST server at " + g.crust
		return nil
	}
	return g.withCrust(cmd, func(ctx context.Context, c *crust.Client) error {
		r, err := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
		if err != nil {
			return err
		}
		for _, s := range r.GetSandboxes() {
			d.add(obstacle{Kind: "sandbox", ID: s.GetSandboxId(),
				Means: fmt.Sprintf("a sandbox (%s) is open, with %d volumes", s.GetKind(), len(s.GetVolumes())),
				Do: "drain the node: the sandbox ends with its pod; one that was started by hand: crustctl sandbox rm " +
					s.GetSandboxId()})
		}
		return nil
	})
}

func (g *globals) printDrained(cmd *cobra.Command, d *drained) error {
	t := table{head: []string{"KIND", "OF", "PODS", "WHAT IT MEANS", "WHAT TO DO"}}
	for _, o := range d.Findings {
		of := o.ID
		if o.Claim != "" {
			of = o.Claim + " (" + o.ID + ")"
		}
		t.rows = append(t.rows, []string{o.Kind, of, cmp.Or(strings.Join(o.Pods, ", "), "-"), o.Means, o.Do})
	}
	if g.output == "json" || len(t.rows) > 0 {
		if err := g.print(cmd.OutOrStdout(), t, d); err != nil {
			return err
		}
	}
	if g.output == "table" {
		fmt.Fprintln(cmd.OutOrStdout(), plain.Text("node "+d.Node+": "+d.verdict(), 1<<16))
	}
	switch {
	case len(d.failed) > 0:
		return errors.Join(d.failed...)
	case len(d.Findings) > 0:
		return found(len(d.Findings))
	}
	return nil
}

func (d *drained) verdict() string {
	here := fmt.Sprintf("%d volumes and %d snapshots lie in its pools", d.Volumes, d.Snapshots)
	switch {
	case len(d.failed) > 0:
		here += "; not everything could be looked at"
	case len(d.Findings) > 0 && d.Remove:
		here += "; do not remove it before the above is done"
	case len(d.Findings) > 0:
		here += ", which come back with it; drain it before it is rebooted"
	case d.Remove:
		here += "; nothing is lost with it"
	default:
		here += ", which come back with it; it can be rebooted"
	}
	if d.Sandboxes != "" {
		here += " (" + d.Sandboxes + ")"
	}
	return here
}
