package node

import (
	"encoding/json"
	"maps"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A repeated CreateVolume gives the volume as it was created, its context too;
// one with another parameter is refused, and the parameter is named.
func TestA13_ARepeatedCreateIsTheSameOrRefused(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := csiclient.Volume{FSType: "ext4"}
	params := map[string]string{
		"fsGroupStrategy": "idmap", "allowRuntimeAssistedMount": "true", "recursiveReadOnly": "IfPossible", "fsGroupChangePolicy": "Always", "provisioning": "thin",
		"csi.storage.k8s.io/pvc/name": "claim",
	}
	made, err := n.Client.Create(ctxOf(t), "a", 64<<20, v, params, nil)
	ok(t, err)
	first := made.GetVolumeContext()
	if first["fsGroupStrategy"] != "idmap" || first["fsGroupChangePolicy"] != "Always" {
		t.Errorf("the context is %v", first)
	}
	for range 2 {
		again := maps.Clone(params)
		again["csi.storage.k8s.io/pvc/name"] = "another's business"
		delete(again, "recursiveReadOnly") // what was given is the default
		delete(again, "provisioning")
		made, err = n.Client.Create(ctxOf(t), "a", 64<<20, v, again, nil)
		ok(t, err)
		if !maps.Equal(made.GetVolumeContext(), first) {
			t.Errorf("the volume was created with %v, and the repeated call says %v", first, made.GetVolumeContext())
		}
		for key, value := range map[string]string{
			"fsGroupStrategy": "chown", "allowRuntimeAssistedMount": "false", "recursiveReadOnly": "Enabled", "fsGroupChangePolicy": "OnRootMismatch", "provisioning": "thick",
		} {
			other := maps.Clone(params)
			other[key] = value
			_, err := n.Client.Create(ctxOf(t), "a", 64<<20, v, other, nil)
			refused(t, err, codes.AlreadyExists, key)
			if key == "fsGroupStrategy" || key == "allowRuntimeAssistedMount" || key == "fsGroupChangePolicy" {
				delete(other, key) // the default is another value as well
				_, err := n.Client.Create(ctxOf(t), "a", 64<<20, v, other, nil)
				refused(t, err, codes.AlreadyExists, key)
			}
		}
		n.Restart()
	}
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
}

// A record of an earlier version has no parameters: what is known is compared,
// and the volume can be used.
func TestA13_RecordsOfTheFirstVersionAreRead(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "a", csiclient.Volume{FSType: "ext4"})
	n.Stop()
	path := strings.TrimSuffix(image(n, v.ID), ".img") + ".json"
	var r struct {
		Kind    string         `json:"kind"`
		Version int            `json:"version"`
		Data    map[string]any `json:"data"`
	}
	ok(t, json.Unmarshal([]byte(read(t, path)), &r))
	if r.Version != 2 {
		t.Fatalf("the record has version %d", r.Version)
	}
	r.Version = 1
	delete(r.Data["volume"].(map[string]any), "parameters")
	b, err := json.Marshal(r)
	ok(t, err)
	ok(t, os.WriteFile(path, b, 0o600))
	n.Start()
	strategy := map[string]string{"fsGroupStrategy": "idmap"}
	for range 2 {
		made, err := n.Client.Create(ctxOf(t), "a", size, v, strategy, nil)
		ok(t, err)
		if made.GetVolumeContext()["fsGroupStrategy"] != "idmap" {
			t.Errorf("the context is %v", made.GetVolumeContext())
		}
		_, err = n.Client.Create(ctxOf(t), "a", size, v, map[string]string{"provisioning": "thick"}, nil)
		refused(t, err, codes.AlreadyExists, "provisioning")
		ok(t, n.Client.Stage(ctxOf(t), v)) // writes the record anew
		ok(t, n.Client.Unstage(ctxOf(t), v.ID))
	}
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}
