// Command crustctl reports what works on this node, and drives a CSI socket by hand with the
// kubelet's order of calls.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/version"
)

// defaultCrust is crustd's default endpoint.
const defaultCrust = "unix:///run/crust/crust.sock"

type globals struct {
	endpoint, kubeletDir, output, crust string
	timeout                             time.Duration

	mounts mountLooks
}

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	c, err := root().ExecuteContextC(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "crustctl:", plain.Lines(explain(err), 1<<16))
	}
	cancel()
	os.Exit(exitCode(c, err))
}

// explain returns the text of an error. The code of a gRPC error appears once, also if other errors
// are joined to it.
func explain(err error) string {
	var s interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &s) {
		return err.Error()
	}
	st := s.GRPCStatus()
	text := strings.ReplaceAll(err.Error(), fmt.Sprintf("rpc error: code = %s desc = ", st.Code()), "")
	if unreached(st) && strings.Contains(text, "permission denied") {
		return text + " (run crustctl as root)"
	}
	if unreached(st) && !errors.Is(err, errCrust) {
		return text + " (is csi-node running? its socket is given with --endpoint, and the kubelet's directory with --kubelet-dir)"
	}
	if st.Code() == codes.Unimplemented && strings.Contains(st.Message(), "unknown service csi.") {
		return text + ": what answers there is no CSI driver (csi-node's socket is given with --endpoint)"
	}
	return fmt.Sprintf("%s: %s", st.Code(), text)
}

// unreached tells whether an error is gRPC's own, of a server that is not there. A server that runs uses the same code, for example for a
// pool that is away.
func unreached(st *status.Status) bool {
	own := []string{"connection error:", "error reading from server:", "name resolver error:", "closing transport", "transport is closing",
		"the connection is draining"}
	return st.Code() == codes.Unavailable &&
		slices.ContainsFunc(own, func(begin string) bool { return strings.HasPrefix(st.Message(), begin) })
}

// neverEmpty are flags without which a command does something else: it compares nothing, or makes an empty volume. So an empty value, as
// of a variable that is not set, is an error.
var neverEmpty = []string{"claim", "from-snapshot", "persistent-volumes", "pool", "volume"}

func root() *cobra.Command {
	g := &globals{}
	c := &cobra.Command{
		Use: "crustctl", Short: "Look after Crust CSI on this node",
		Version: version.String(), SilenceErrors: true, SilenceUsage: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range neverEmpty {
				if f := cmd.Flags().Lookup(name); f != nil && f.Changed && f.Value.String() == "" {
					return fmt.Errorf("--%s is empty: give it a value, or leave it out", name)
				}
			}
			if g.output != "table" && g.output != "json" {
				return fmt.Errorf("--output %q: table or json", g.output)
			}
			if g.endpoint == "" {
				g.endpoint = findSocket(sockets(g.kubeletDir))
			}
			if !strings.HasPrefix(g.endpoint, "unix:") {
				return fmt.Errorf("--endpoint %q: give unix:///absolute/path", g.endpoint)
			}
			return nil
		},
	}
	f := c.PersistentFlags()
	f.StringVar(&g.endpoint, "endpoint", "", "the driver's socket, unix:///path (default: the first of "+
		strings.Join(sockets("/var/lib/kubelet"), ", ")+" that exists)")
	f.StringVar(&g.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "the driver's --kubelet-dir")
	f.StringVarP(&g.output, "output", "o", "table", "table or json")
	f.DurationVar(&g.timeout, "timeout", 2*time.Minute, "for each command; sandbox run: 10m0s")
	c.AddCommand(doctorCommand(g), poolCommand(g), volumeCommand(g), sandboxCommand(g), nodeCommand(g), historyCommand(g), bundleCommand(g),
		topCommand(g), conformanceCommand(g))
	if err := g.complete(c); err != nil {
		panic(err) // a flag has two completions
	}
	return c
}

// sockets lists the paths where csi-node serves: its default, and that of the manifests.
func sockets(kubeletDir string) []string {
	return []string{"/run/csi-node/csi.sock", filepath.Join(kubeletDir, "plugins/csi.crust.dev/csi.sock")}
}

// findSocket returns the endpoint of the first path that is a socket, or of the first path if none
// is.
func findSocket(paths []string) string {
	for _, path := range paths {
		if st, err := os.Stat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
			return "unix://" + path
		}
	}
	return "unix://" + paths[0]
}

// with calls f with a connection, and shows progress on a terminal if it takes long.
func (g *globals) with(cmd *cobra.Command, f func(ctx context.Context, c *csiclient.Client) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), g.timeout)
	defer cancel()
	c, err := csiclient.Dial(g.endpoint, g.kubeletDir)
	if err != nil {
		return err
	}
	defer c.Close()
	done := make(chan struct{})
	go waiting(cmd.ErrOrStderr(), cmd.CommandPath(), done)
	defer close(done)
	return f(ctx, c)
}

func waiting(w io.Writer, what string, done <-chan struct{}) {
	begin := time.Now()
	for tick := time.NewTicker(5 * time.Second); ; {
		select {
		case <-done:
			tick.Stop()
			return
		case <-tick.C:
			fmt.Fprintf(w, "%s: %s so far\n", what, time.Since(begin).Round(time.Second))
		}
	}
}

// table holds rows with a heading.
type table struct {
	head []string
	rows [][]string
}

// print writes the table, or data as JSON.
func (g *globals) print(w io.Writer, t table, data any) error {
	if g.output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(data)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, strings.Join(t.head, "\t"))
	for _, r := range t.rows {
		for i := range r {
			r[i] = plain.Text(r[i], 1<<16) // much of it comes from guests and runtimes
		}
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}
