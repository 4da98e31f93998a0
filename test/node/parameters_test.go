package node

import (
	"encoding/json"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// A13: a repeated CreateVolume returns the volume as created, with its context. Another parameter
// is refused, and the error names it.
func TestA13_ARepeatedCreateIsTheSameOrRefused(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := csiclient.Volume{FSType: "ext4"}
	params := map[string]string{
		"fsGroupStrategy": "idmap", "allowRuntimeAssistedMount": "true", "recursiveReadOnly": "IfPossible", "fsGroupChangePolicy": "Always",
		"provisioning":                "thin",
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
		delete(again, "recursiveReadOnly") // this is the default
		delete(again, "provisioning")
		made, err = n.Client.Create(ctxOf(t), "a", 64<<20, v, again, nil)
		ok(t, err)
		if !maps.Equal(made.GetVolumeContext(), first) {
			t.Errorf("the volume was created with %v, and the repeated call says %v", first, made.GetVolumeContext())
		}
		for key, value := range map[string]string{
			"fsGroupStrategy": "chown", "allowRuntimeAssistedMount": "false", "recursiveReadOnly": "Enabled",
			"fsGroupChangePolicy": "OnRootMismatch", "provisioning": "thick",
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

// A13: a record of an earlier version has no parameters. Known fields are compared, and the volume
// can be used.
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

// A13: a repeated call returns a finished copy, whatever has become of its origin. A caller that
// got an error would forget the volume, and nobody would delete it.
func TestA13_ARepeatedCopyWhoseOriginIsGone(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "origin", csiclient.Volume{FSType: "ext4"})
	snap, err := n.Client.CreateSnapshot(ctxOf(t), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.ID})
	ok(t, err)
	sources := map[string]*csi.VolumeContentSource{
		"restored": {Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{
			SnapshotId: snap.GetSnapshot().GetSnapshotId()}}},
		"cloned": {Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.ID}}},
	}
	made := map[string]string{}
	for name, source := range sources {
		c, err := n.Client.Create(ctxOf(t), name, size, csiclient.Volume{FSType: "ext4"}, nil, source)
		ok(t, err)
		made[name] = c.GetVolumeId()
	}
	_, err = n.Client.DeleteSnapshot(ctxOf(t), &csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshot().GetSnapshotId()})
	ok(t, err)
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
	for name, source := range sources {
		again, err := n.Client.Create(ctxOf(t), name, size, csiclient.Volume{FSType: "ext4"}, nil, source)
		if err != nil || again.GetVolumeId() != made[name] {
			t.Errorf("%s, repeated after its origin was deleted: %v %v", name, again, err)
		}
		_, err = n.Client.Create(ctxOf(t), "another", size, csiclient.Volume{FSType: "ext4"}, nil, source)
		refused(t, err, codes.NotFound)
		ok(t, n.Client.Delete(ctxOf(t), made[name]))
	}
}

// A13: nor is a clone refused because its origin grew after it was made.
func TestA13_ARepeatedCopyWhoseOriginGrew(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	v := create(t, n, "origin", csiclient.Volume{Block: true})
	ask := func() (*csi.Volume, error) {
		r, err := n.Client.CreateVolume(ctxOf(t), &csi.CreateVolumeRequest{
			Name: "clone", CapacityRange: &csi.CapacityRange{RequiredBytes: size, LimitBytes: size},
			VolumeCapabilities:  []*csi.VolumeCapability{csiclient.Volume{Block: true}.Capability()},
			VolumeContentSource: cloneOf(v.ID),
		})
		return r.GetVolume(), err
	}
	made, err := ask()
	ok(t, err)
	_, err = expand(t, n, v.ID, 2*size)
	ok(t, err)
	again, err := ask()
	if err != nil || again.GetVolumeId() != made.GetVolumeId() || again.GetCapacityBytes() != size {
		t.Errorf("repeated after its origin grew: %v %v", again, err)
	}
	// Another clone of it has to be larger.
	_, err = n.Client.CreateVolume(ctxOf(t), &csi.CreateVolumeRequest{
		Name: "another", CapacityRange: &csi.CapacityRange{RequiredBytes: size, LimitBytes: size},
		VolumeCapabilities:  []*csi.VolumeCapability{csiclient.Volume{Block: true}.Capability()},
		VolumeContentSource: cloneOf(v.ID),
	})
	refused(t, err, codes.OutOfRange)
	ok(t, n.Client.Delete(ctxOf(t), made.GetVolumeId()))
	ok(t, n.Client.Delete(ctxOf(t), v.ID))
}
