package node

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// D07: the disk of the state directory was full for a while, and that tore a line of the audit log. csi-node starts meanwhile, because pods
// end on such a node too. Afterwards every line is whole again: only the torn one is lost.
func TestD07_ALineThatAFullDiskToreCostsOnlyItself(t *testing.T) {
	t.Parallel()
	for name, restart := range map[string]bool{"the same process": false, "another process": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			state := t.TempDir()
			run(t, "mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "state", state)
			t.Cleanup(func() { testnode.Unmount(t, state) })
			n := testnode.New(t, "", "--state-dir", state)
			log := filepath.Join(state, audit.FileName)
			v := csiclient.Volume{FSType: "ext4"}
			create := func(name string) string {
				t.Helper()
				made, err := n.Client.Create(ctxOf(t), name, size, v, nil, nil)
				ok(t, err)
				return made.GetVolumeId()
			}
			all := []string{create("first")}
			ballast := filepath.Join(state, "ballast")
			fill(ballast)
			for torn := false; !torn; {
				if len(all) > 100 {
					t.Fatal("no line is torn")
				}
				all = append(all, create("v"+itoa(len(all))))
				b, err := os.ReadFile(log)
				ok(t, err)
				torn = !bytes.HasSuffix(b, []byte("\n"))
				if !torn && len(b)%os.Getpagesize() == 0 { // a line ends with the last page that there is: nothing would be torn
					ok(t, os.Remove(ballast))
					all = append(all, create("v"+itoa(len(all))))
					fill(ballast)
				}
			}
			said(t, n, "the audit log lacks an event")
			if restart {
				n.Restart()
			}
			ok(t, os.Remove(ballast))
			for _, id := range all {
				ok(t, n.Client.Delete(ctxOf(t), id))
			}
			events, torn, err := audit.Read(state)
			ok(t, err)
			if torn != 1 {
				t.Errorf("%d lines are torn", torn)
			}
			deleted := map[string]int{}
			for _, e := range events {
				if e.Action == audit.Deleted {
					deleted[e.Volume+" "+string(e.Outcome)]++
				}
			}
			for _, id := range all {
				if deleted[id+" begun"] != 1 || deleted[id+" done"] != 1 {
					t.Errorf("of the deletion of %s the log has: begun %d times, done %d times", id, deleted[id+" begun"], deleted[id+" done"])
				}
			}
		})
	}
}
