package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// bundle is the content of a support bundle, by name. A part that cannot be read does not fail the
// whole: the bundle records the reason.
type bundle struct {
	g      *globals
	parts  map[string][]byte
	failed []string
	daemon daemon
}

// add adds a part, or the reason why it is missing.
func (b *bundle) add(name string, content []byte, err error) {
	if err != nil {
		b.failed = append(b.failed, name+": "+explain(err))
		return
	}
	b.parts[name] = content
}

func bundleCommand(g *globals) *cobra.Command {
	var file, stateDir string
	c := &cobra.Command{
		Use: "support-bundle", Short: "Collect what this node has and what happened into a file for support, without secrets",
		Long: "Write a tar.gz with versions, csi-node's flags, the doctor's findings, pools, volumes, sandboxes, mounts of volumes, " +
			"metrics, the audit log and records.\n" +
			"It has names of pods, claims and devices. It has no tokens, no secrets of CSI requests, no environment, no content of volumes;\n" +
			"of mount options and records only what is known to be harmless. csi-node's own log is not in it.",
		Example: "  crustctl support-bundle\n  kubectl -n crust-csi exec POD -c csi-node -- crustctl support-bundle -o - >bundle.tar.gz",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			now := time.Now()
			b := &bundle{g: g, parts: map[string][]byte{}}
			out, say := cmd.OutOrStdout(), cmd.ErrOrStderr()
			if file != "-" {
				host, err := os.Hostname()
				if err != nil {
					return err
				}
				file = cmp.Or(file, fmt.Sprintf("crust-support-%s-%s.tar.gz", host, now.UTC().Format("20060102-150405")))
				f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
				if errors.Is(err, os.ErrExist) {
					return fmt.Errorf("%w; it is not overwritten: give another name with -o", err)
				}
				if err != nil {
					return fmt.Errorf("%w; give a file in another directory with -o, or -o - for standard output", err)
				}
				defer f.Close()
				out, say = f, cmd.OutOrStdout()
			}
			b.collect(cmd.Context(), stateDir)
			err := b.write(out, now)
			if err != nil && file != "-" {
				return errors.Join(err, os.Remove(file))
			}
			if err != nil {
				return err
			}
			return b.report(say, file)
		},
	}
	// Elsewhere -o is a format; here it is the file.
	c.Flags().StringVarP(&file, "output", "o", "",
		"the file to write, which must not exist; - is standard output (default: crust-support-HOST-TIME.tar.gz here)")
	c.Flags().StringVar(&stateDir, "state-dir", "", "csi-node's --state-dir (default: as it was started with)")
	c.Flags().StringVar(&g.crust, "crust", defaultCrust, "CRUST socket, where there is one")
	return c
}

// write writes the parts in name order.
func (b *bundle) write(w io.Writer, now time.Time) error {
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	for _, name := range b.names() {
		h := &tar.Header{Name: "crust-support/" + name, Mode: 0o600, Size: int64(len(b.parts[name])), ModTime: now.Truncate(time.Second)}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if _, err := t.Write(b.parts[name]); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close())
}

func (b *bundle) names() []string {
	var names []string
	for name := range b.parts {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// report lists the contents.
func (b *bundle) report(w io.Writer, file string) error {
	var s bytes.Buffer
	records := 0
	t := table{head: []string{"IN THE BUNDLE", "BYTES"}}
	for _, name := range b.names() {
		if strings.HasPrefix(name, "records/") {
			records++
			continue
		}
		t.rows = append(t.rows, []string{name, fmt.Sprint(len(b.parts[name]))})
	}
	if err := b.g.print(&s, t, nil); err != nil {
		return err
	}
	fmt.Fprintf(&s, "and %d records\n", records)
	if len(b.failed) > 0 {
		fmt.Fprintf(&s, "%d parts could not be had: missing.txt says why\n", len(b.failed))
	}
	fmt.Fprintln(&s, "It has the names of pods, claims, volumes and devices of this node. It has no secrets; look into it before you "+
		"give it away.")
	if file != "-" {
		fmt.Fprintln(&s, file)
	}
	_, err := w.Write(s.Bytes())
	return err
}
