package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/inventory"
)

// auditLog writes the parts of a log, oldest first, as restarts and rotations leave them, and
// returns the state directory.
func auditLog(t *testing.T, parts ...[]audit.Event) string {
	t.Helper()
	dir := t.TempDir()
	for i, events := range parts {
		var b bytes.Buffer
		for _, e := range events {
			line, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			b.Write(append(line, '\n'))
		}
		name := audit.FileName
		if n := len(parts) - 1 - i; n > 0 {
			name = fmt.Sprintf("audit.%d.jsonl", n)
		}
		if err := os.WriteFile(filepath.Join(dir, name), b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func event(hoursAgo int, action audit.Action, volume string, more ...func(*audit.Event)) audit.Event {
	e := audit.Event{Time: time.Now().Add(-time.Duration(hoursAgo) * time.Hour), Action: action, Outcome: audit.Done, Volume: volume}
	for _, f := range more {
		f(&e)
	}
	return e
}

// crustctl runs the command in this process.
func crustctl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := root()
	c.SetArgs(append([]string{"--endpoint", "unix://" + filepath.Join(t.TempDir(), "none")}, args...))
	c.SetOut(&out)
	c.SetErr(&out)
	err := c.Execute()
	return out.String(), err
}

func TestB08_HistoryOfAClaimOverRotations(t *testing.T) {
	named := func(e *audit.Event) { e.Name, e.Claim = "pvc-1", "shop/orders" }
	dir := auditLog(t,
		[]audit.Event{event(9, audit.Created, "p.v1", named), event(8, audit.Created, "p.v2",
			func(e *audit.Event) { e.Name, e.Claim = "pvc-2", "shop/carts" })},
		[]audit.Event{event(7, audit.Staged, "p.v1"), event(6, audit.SnapshotMade, "p.v1", func(e *audit.Event) { e.Snapshot = "p.s1" })},
		[]audit.Event{event(5, audit.Created, "p.v3", func(e *audit.Event) { e.Source = "p.s1" }), event(4, audit.Staged, "p.v2"),
			event(1, audit.Unstaged, "p.v1"),
			event(0, audit.SnapshotDeleted, "", func(e *audit.Event) { e.Snapshot = "p.s1" })},
	)
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "p.v1 created, p.v2 created, p.v1 staged, p.v1 snapshot-created, p.v3 created, p.v2 staged, p.v1 unstaged,  snapshot-deleted"},
		{[]string{"--claim", "shop/orders"},
			"p.v1 created, p.v1 staged, p.v1 snapshot-created, p.v3 created, p.v1 unstaged,  snapshot-deleted"},
		{[]string{"--volume", "pvc-2"}, "p.v2 created, p.v2 staged"},
		{[]string{"--volume", "p.v2"}, "p.v2 created, p.v2 staged"},
		{[]string{"--claim", "shop/carts", "--since", "5h"}, "p.v2 staged"},
		{[]string{"--since", "90m"}, "p.v1 unstaged,  snapshot-deleted"},
		{[]string{"--volume", "pvc-2", "--claim", "shop/orders"}, ""},
	} {
		out, err := crustctl(t, append([]string{"history", "--state-dir", dir, "-o", "json"}, c.args...)...)
		if err != nil {
			t.Fatalf("%v: %v", c.args, err)
		}
		var events []audit.Event
		if err := json.Unmarshal([]byte(out[strings.Index(out, "["):]), &events); err != nil {
			t.Fatalf("%v: %v\n%s", c.args, err, out)
		}
		var got []string
		for _, e := range events {
			got = append(got, e.Volume+" "+string(e.Action))
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("%v: %s\nwant %s", c.args, strings.Join(got, ", "), c.want)
		}
	}
	out, err := crustctl(t, "history", "--state-dir", dir, "--claim", "shop/none")
	if err != nil || !strings.Contains(out, "none of the 8 events") {
		t.Errorf("%v %s", err, out)
	}
	if _, err := crustctl(t, "history", "--state-dir", t.TempDir()); err == nil {
		t.Error("no log is no error")
	}
}

// The line of the volume's creation was rotated away; the driver still knows its claim.
func TestB08_HistoryOfAVolumeWhoseMakingIsNotKept(t *testing.T) {
	events := []audit.Event{event(2, audit.Staged, "p.v1"), event(1, audit.Staged, "p.v2")}
	known := func() []*inventory.Volume {
		return []*inventory.Volume{{Id: "p.v1", Name: "pvc-1", Claim: "shop/orders"}, {Id: "p.v2", Name: "pvc-2", Claim: "shop/carts"}}
	}
	for _, f := range []historyFilter{{claim: "shop/orders"}, {volume: "pvc-1"}} {
		if got := f.apply(events, time.Now(), known); len(got) != 1 || got[0].Volume != "p.v1" {
			t.Errorf("%+v: %+v", f, got)
		}
	}
}
