package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/internal/scrub"
	"github.com/crust-csi/crust-csi/internal/version"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
)

// onePart limits the wait for each part: a node in trouble should still yield a bundle.
const onePart = 20 * time.Second

func (b *bundle) collect(ctx context.Context, stateDir string) {
	var err error
	if b.daemon, err = lookAtDaemon(b.g.endpoint); err != nil {
		b.add("csi-node-flags.txt", nil, err)
	} else {
		b.add("csi-node-flags.txt", []byte(strings.Join(scrub.Args(b.daemon.args), "\n")+"\n"), nil)
	}
	stateDir = cmp.Or(stateDir, b.daemon.flag("state-dir"), defaultStateDir)
	kernel, err := os.ReadFile("/proc/version")
	b.add("kernel.txt", kernel, err)
	b.add("doctor.txt", b.doctor(ctx), nil)
	b.askDriver(ctx)
	b.askCrust(ctx)
	metrics, err := b.metrics(ctx)
	b.add("metrics.txt", metrics, err)
	events, err := auditLines(stateDir)
	b.add("audit.jsonl", events, err)
	b.records(stateDir)
	b.poolRecords(stateDir)
	slices.Sort(b.failed)
	if len(b.failed) > 0 {
		b.add("missing.txt", []byte(scrub.Text(plain.Lines(strings.Join(b.failed, "\n")+"\n", 1<<20))), nil)
	}
}

func (b *bundle) doctor(ctx context.Context) []byte {
	t := table{head: []string{"WHAT", "WORKS", "WHAT TO DO"}}
	for _, f := range examine(ctx, b.g) {
		t.rows = append(t.rows, []string{f.What, f.Answer, f.Do})
	}
	var out bytes.Buffer
	asTable := globals{output: "table"}
	_ = asTable.print(&out, t, nil) // a buffer accepts every write
	return []byte(scrub.Text(out.String()))
}

func indented(v any, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	out, err := json.MarshalIndent(v, "", "  ")
	return []byte(scrub.Text(string(out)) + "\n"), err
}

func (b *bundle) askDriver(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, onePart)
	defer cancel()
	c, err := csiclient.Dial(b.g.endpoint, b.g.kubeletDir)
	if err != nil {
		b.add("volumes.json", nil, err)
		return
	}
	defer c.Close()
	versions := "crustctl " + version.String() + "\n"
	info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err == nil {
		versions += fmt.Sprintf("csi-node %s, driver %s, pools %s\n", info.GetVendorVersion(), info.GetName(), info.GetManifest()["pools"])
	} else {
		b.failed = append(b.failed, "versions.txt: csi-node's: "+explain(err))
	}
	b.add("versions.txt", []byte(versions), nil)
	add := func(name string, v any, err error) {
		content, err := indented(v, err)
		b.add(name, content, err)
	}
	pools, err := c.DescribePools(ctx, &inventory.DescribePoolsRequest{})
	add("pools.json", pools, err)
	checked, err := c.CheckPools(ctx, &inventory.CheckPoolsRequest{})
	add("pool-check.json", checked, err)
	running, err := c.DescribeOperations(ctx, &inventory.DescribeOperationsRequest{})
	add("operations.json", running, err)
	volumes, err := c.Volumes(ctx)
	add("volumes.json", volumes, err)
	mounts, merr := mountsOf(volumes)
	b.add("mounts.txt", mounts, errors.Join(err, merr))
	snapshots, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	add("snapshots.json", snapshots.GetEntries(), err)
}

// mountsOf returns the lines of the mount table for the volumes, without options that could be
// secrets.
func mountsOf(volumes []*inventory.Volume) ([]byte, error) {
	targets, devices := map[string]bool{}, map[string]bool{}
	for _, v := range volumes {
		devices[v.GetDevice()] = v.GetDevice() != ""
		for _, u := range v.GetUses() {
			targets[u.GetTarget()] = true
		}
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out strings.Builder
	for line := range strings.Lines(string(table)) {
		before, after, _ := strings.Cut(line, " - ")
		head, tail := strings.Fields(before), strings.Fields(after)
		if len(head) > 4 && len(tail) > 1 && (targets[head[4]] || devices[tail[1]]) {
			fmt.Fprintln(&out, scrub.MountLine(line))
		}
	}
	return []byte(out.String()), nil
}

func (b *bundle) askCrust(ctx context.Context) {
	if _, err := os.Stat(strings.TrimPrefix(b.g.crust, "unix://")); errors.Is(err, os.ErrNotExist) {
		b.failed = append(b.failed, "sandboxes.json: no CRUST server at "+b.g.crust)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, onePart)
	defer cancel()
	c, err := crust.Dial(b.g.crust)
	if err != nil {
		b.add("sandboxes.json", nil, err)
		return
	}
	defer c.Close()
	r, err := c.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	content, err := indented(r.GetSandboxes(), err)
	b.add("sandboxes.json", content, err)
}

// metrics adds csi-node's metrics, if it serves any.
func (b *bundle) metrics(ctx context.Context) ([]byte, error) {
	address := b.daemon.flag("metrics-address")
	if address == "" {
		return nil, errors.New("csi-node serves none (--metrics-address), or its flags are not known")
	}
	port := address[strings.LastIndex(address, ":")+1:]
	host := strings.TrimSuffix(strings.TrimSuffix(address, port), ":")
	if host == "" || host == "*" {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, onePart)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+host+":"+port+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	// Without a proxy: the environment may name one.
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	const most = 16 << 20
	body, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err != nil || resp.StatusCode != http.StatusOK {
		return nil, errors.Join(fmt.Errorf("%s answered %s", req.URL, resp.Status), err)
	}
	var out strings.Builder
	for line := range strings.Lines(string(body)) {
		name := strings.TrimPrefix(strings.TrimPrefix(line, "# HELP "), "# TYPE ")
		if strings.HasPrefix(name, "crust_") || strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			out.WriteString(line)
		}
	}
	return []byte(scrub.Text(out.String())), nil
}

// auditLines re-encodes the events, so that only known fields are included.
func auditLines(stateDir string) ([]byte, error) {
	events, _, err := audit.Read(stateDir)
	if err == nil && len(events) == 0 {
		err = fmt.Errorf("there is no audit log in %s", stateDir)
	}
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	for i := range events {
		if err := e.Encode(events[i]); err != nil {
			return nil, err
		}
	}
	return []byte(scrub.Text(out.String())), nil
}

// records adds the records of the state directory.
func (b *bundle) records(stateDir string) {
	for _, sub := range []string{"pools", "staged", "published", "deferred", "static", "static/devices", "static/reads"} {
		b.recordsIn("records/state/"+sub, filepath.Join(stateDir, sub))
	}
}

// poolRecords adds the records of the pools that the node has or had, by flag, by configuration
// file or by default.
func (b *bundle) poolRecords(stateDir string) {
	dirs, err := poolhome.Known(filepath.Join(stateDir, "pools"))
	if err != nil {
		b.add("records/state/pools", nil, err)
	}
	for name, dir := range dirs {
		for _, sub := range []string{"volumes", "snapshots"} {
			b.recordsIn("records/pool-"+name+"/"+sub, filepath.Join(dir, sub))
		}
	}
}

func (b *bundle) recordsIn(as, dir string) {
	names, err := record.Names(dir)
	if err != nil {
		b.add(as, nil, err)
	}
	for _, name := range names {
		content, err := readRecord(filepath.Join(dir, name+record.Extension))
		b.add(as+"/"+name+record.Extension, content, err)
	}
}

func readRecord(path string) ([]byte, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	const most = 1 << 20
	if !st.Mode().IsRegular() || st.Size() > most {
		return nil, errors.New("not a record")
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return scrub.Record(content)
}
