package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/internal/rawdevice"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fsprogs"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// finding is one line of the doctor's output.
type finding struct {
	What   string `json:"what"`
	Answer string `json:"answer"`
	Do     string `json:"do,omitempty"`
	needed bool   // nothing works without it, and it is missing
}

func doctorCommand(g *globals) *cobra.Command {
	c := &cobra.Command{Use: "doctor", Short: "Tell what works on this node, what does not, and what to do", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list := examine(cmd.Context(), g)
			t := table{head: []string{"WHAT", "WORKS", "WHAT TO DO"}}
			for _, f := range list {
				t.rows = append(t.rows, []string{f.What, f.Answer, f.Do})
			}
			if err := g.print(cmd.OutOrStdout(), t, list); err != nil {
				return err
			}
			for _, f := range list {
				if f.needed {
					return fmt.Errorf("%s: %s", f.What, f.Answer)
				}
			}
			return nil
		}}
	c.Flags().StringVar(&g.crust, "crust", defaultCrust, "CRUST socket, where there is one")
	return c
}

func examine(ctx context.Context, g *globals) []finding {
	var list []finding
	say := func(what string, err error, do string) {
		f := finding{What: what, Answer: "yes"}
		if err != nil {
			f.Answer, f.Do = "no: "+explain(err), do
		}
		list = append(list, f)
	}
	need := func(what string, err error, do string) {
		say(what, err, do)
		list[len(list)-1].needed = err != nil
	}
	if !mounter.IsRoot() {
		need("running as root", fmt.Errorf("this process is not root"), "run crustctl as root: the answers below may differ")
	}
	features := append(mounter.Features(), fsprogs.New(nil).ProbeConfinement())
	for _, fs := range fstype.Formats() {
		features = append(features, fsprogs.New(nil).ProbeIdmap(ctx, fs, os.TempDir(), ""))
	}
	for _, f := range features {
		out := finding{What: f.Name, Answer: f.Answer.String()}
		if f.Answer != mounter.Yes {
			out.Answer += ": " + f.Why
			out.Do = "without it, " + f.Cost
			if !strings.HasPrefix(f.Since, "any") {
				out.Do += fmt.Sprintf(" (Linux %s has it)", f.Since)
			}
		}
		list = append(list, out)
	}
	list = append(list, finding{What: "raw block volumes", Answer: strings.TrimPrefix(rawdevice.Describe(""), "raw block volumes: ")})
	need("loop devices", loopdev.Available(), "modprobe loop; in a container mount the host's /dev")
	for _, fs := range fstype.Formats() {
		program, pkg := fstype.Of(fs).Make[0], fstype.Of(fs).Package
		_, err := exec.LookPath(program)
		say(program, err, "apt-get install "+pkg)
	}
	nfs := mounter.ProbeFilesystem(fstype.NFS)
	shares := finding{What: fstype.NFS, Answer: nfs.Answer.String()}
	if nfs.Answer != mounter.Yes {
		shares.Answer, shares.Do = shares.Answer+": "+nfs.Why, "only for static NFS volumes: a kernel with NFS"
	}
	list = append(list, shares)
	root, err := mounter.OpenRoot(g.kubeletDir)
	if err == nil {
		err = root.Close()
	}
	need("kubelet directory "+g.kubeletDir, err, "create it, or give --kubelet-dir")
	list = append(list, udevd(""))
	const crustOnly = "only for volumes that sandboxes mount (docs/sandboxes.md): "
	_, err = exec.LookPath("qemu-system-x86_64")
	say("QEMU for microVMs", err, crustOnly+"apt-get install qemu-system-x86")
	answer, err := g.probeCrust(ctx)
	say("CRUST server at "+g.crust, err, crustOnly+"start crustd, or give --crust")
	if err == nil {
		list[len(list)-1].Answer = answer
	} else if _, serr := os.Stat(strings.TrimPrefix(g.crust, "unix://")); errors.Is(serr, os.ErrNotExist) && inContainer("") {
		list[len(list)-1].Answer = "cannot tell: this is a container, which does not have that socket"
		list[len(list)-1].Do = onNode
	}
	rooms, err := g.probe(ctx)
	need("driver at "+g.endpoint, err, remedyOf(err))
	if err == nil {
		held, err := driverCapabilities(g.endpoint)
		if err != nil {
			held = []finding{{What: "driver's capabilities", Answer: "cannot tell: " + err.Error(), Do: "run crustctl where csi-node runs"}}
		}
		list = append(list, held...)
	}
	return append(list, rooms...)
}

// remedyOf says what to do about an error of a call to csi-node.
func remedyOf(err error) string {
	st, ok := status.FromError(err)
	if !ok || unreached(st) {
		return "start csi-node, or give --endpoint"
	}
	switch st.Code() {
	case codes.DeadlineExceeded, codes.Canceled:
		return "csi-node does not answer: see its log, and whether a disk hangs"
	case codes.Unimplemented:
		return "give csi-node's socket with --endpoint"
	}
	return "csi-node runs, but is not ready; the message says why (docs/troubleshooting.md)"
}

// room reports the space left in a pool.
func room(pool string, left int64) finding {
	const little = 1 << 30
	f := finding{What: "room in pool " + pool, Answer: "yes: " + size(left)}
	if left < little {
		f.Answer = "hardly: " + size(left)
		f.Do = "if its disk is not mounted, mount it; otherwise delete volumes or snapshots, or enlarge the pool"
		f.needed = left == 0
	}
	return f
}

// probeCrust asks the CRUST server which file systems its sandboxes mount.
func (g *globals) probeCrust(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, err := crust.Dial(g.crust)
	if err != nil {
		return "", err
	}
	defer c.Close()
	r, err := c.RuntimeGetSupportedFileSystems(ctx, &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	if err != nil {
		return "", fmt.Errorf("%w: %w", errCrust, err)
	}
	if len(r.GetFileSystems()) == 0 {
		return "yes, but it has met no guest yet, so volumes are mounted by the node: boot one", nil
	}
	return "yes: sandboxes mount " + strings.Join(r.GetFileSystems(), ", "), nil
}

// probe checks that the driver is ready, and returns the space left in its pools, nil if it has no
// pool.
func (g *globals) probe(ctx context.Context) (rooms []finding, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := csiclient.Dial(g.endpoint, g.kubeletDir)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return nil, err
	}
	for _, pool := range strings.Split(info.GetManifest()["pools"], ",") {
		if pool == "" {
			continue // a node without pools
		}
		r, err := c.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: map[string]string{"pool": pool}})
		if err != nil {
			rooms = append(rooms, finding{What: "room in pool " + pool, Answer: "cannot tell: " + err.Error(), Do: "see the driver's log"})
			continue
		}
		rooms = append(rooms, room(pool, r.GetAvailableCapacity()))
	}
	// Last, because a driver that is not ready has still reported its pools.
	_, err = c.Probe(ctx, &csi.ProbeRequest{})
	return rooms, err
}
