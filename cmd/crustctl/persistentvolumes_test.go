package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/inventory"
)

const listed = `{"metadata": {"name": "a"}, "spec": {"csi": {"driver": "csi.crust.dev", "volumeHandle": "pool.v00000000000000000000000000000000"}, "nodeAffinity": {"required":
	{"nodeSelectorTerms": [{"matchExpressions": [{"key": "topology.csi.crust.dev/node", "operator": "In", "values": ["node-1"]}]}]}}}}`

// An incomplete list of PersistentVolumes is refused.
func TestB08_APartOfTheListIsRefused(t *testing.T) {
	for text, words := range map[string]string{
		`{"kind": "List", "metadata": {"resourceVersion": ""}, "items": [` + listed + `]}`:                   "",
		`{"kind": "PersistentVolumeList", "metadata": {"resourceVersion": "7"}, "items": []}`:                "",
		`{"kind": "PersistentVolumeList", "metadata": {"continue": "x"}, "items": [` + listed + `]}`:         "part",
		`{"kind": "PersistentVolumeList", "metadata": {"remainingItemCount": 5}, "items": [` + listed + `]}`: "part",
		`{"kind": "List", "items": [` + listed + `]} {"kind": "List", "items": []}`:                          "after top-level value",
		`{"kind": "List"}`: "no items",
		`{"kind": "List", "items": [{"kind": "PersistentVolumeClaim"}]}`:                                                  "PersistentVolumeClaim",
		`{"kind": "PersistentVolume", "metadata": {"name": "a"}}`:                                                         "not List",
		`{"kind": "List", "items": [` + listed[:40]:                                                                       "unexpected end",
		`{"kind": "List", "metadata": {"continue": ""}, "items": [{"kind": "PersistentVolume"}, ` + listed + `] }` + "\n": "",
	} {
		_, err := readPersistentVolumes(strings.NewReader(text), "-")
		if words == "" && err != nil || words != "" && (err == nil || !strings.Contains(err.Error(), words)) {
			t.Errorf("%s: %v, want %q", text, err, words)
		}
	}
}

// FuzzPersistentVolumes: an accepted list is one complete list. On a node with one volume, a
// finding is about that volume or about a PersistentVolume in the list.
func FuzzPersistentVolumes(f *testing.F) {
	for _, s := range []string{
		`{"kind": "List", "items": [` + listed + `]}`, `{"kind": "List", "metadata": {"continue": "x"}, "items": []}`,
		`{"kind": "List", "items": [{"spec": {"csi": null}}]}`,
		`{"kind": "List", "items": [{"spec": {"csi": {"driver": "csi.crust.dev", "volumeHandle": "other.v1"}}}]}`,
		`{"kind": "PersistentVolumeList", "items": null}`, `{}`,
	} {
		f.Add([]byte(s))
	}
	const here = "pool.v11111111111111111111111111111111"
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := parsePersistentVolumes(b)
		if err != nil {
			return
		}
		var whole struct {
			Metadata struct{ Continue string }
			Items    []json.RawMessage
		}
		if err := json.Unmarshal(b, &whole); err != nil || whole.Metadata.Continue != "" || len(whole.Items) != len(list) {
			t.Errorf("%q is a list of %d: %v", b, len(list), err)
		}
		c := &checkedPools{Pools: []string{"pool"}, driver: "csi.crust.dev", node: "node-1",
			volumes: []*inventory.Volume{{Id: here, Pool: "pool"}}}
		if err := c.compare(list, true); err != nil {
			t.Fatal(err)
		}
		ours := 0
		for _, pv := range list {
			if pv.Spec.CSI != nil && pv.Spec.CSI.Driver == "csi.crust.dev" {
				ours++
			}
		}
		if ours == 0 && len(c.Findings) > 0 {
			t.Errorf("%q knows no volume of the driver, and says %+v", b, c.Findings)
		}
		for _, m := range c.Findings {
			if m.Kind == withoutVolume && (m.ID == here || !bytes.Contains(b, []byte("node-1")) && !bytes.Contains(b, []byte(`\u`))) ||
				m.Kind == withoutPersistentVolume && m.ID != here {
				t.Errorf("%q: %+v", b, m)
			}
		}
	})
}
