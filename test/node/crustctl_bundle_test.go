package node

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// unpack returns the parts of a bundle by name, and the names in order.
func unpack(t *testing.T, path string) (parts map[string]string, names []string) {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	ok(t, err)
	parts = map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return parts, names
		}
		ok(t, err)
		content, err := io.ReadAll(r)
		ok(t, err)
		if h.Mode != 0o600 {
			t.Errorf("%s has mode %o", h.Name, h.Mode)
		}
		name := strings.TrimPrefix(h.Name, "crust-support/")
		parts[name] = string(content)
		names = append(names, name)
	}
}

// B8: a secret is in every possible place, but not in the bundle.
func TestB08_TheSupportBundleHoldsNoSecret(t *testing.T) {
	t.Parallel()
	n := testnode.NewStopped(t, "", "--allow-device", "/dev/loop*", "--metrics-address", freeAddress(t), "-v", "9")
	n.Env = []string{"CRUST_PASSWORD=" + secret}
	n.Begin()
	tell := newTeller(t, n.Endpoint())
	controller, node := csi.NewControllerClient(tell.conn), csi.NewNodeClient(tell.conn)
	v := csiclient.Volume{FSType: "ext4"}
	made, err := controller.CreateVolume(ctxOf(t), &csi.CreateVolumeRequest{Name: "pvc-bundle",
		CapacityRange:      &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{v.Capability()}, Parameters: ofClaim})
	ok(t, err)
	v.ID = made.GetVolume().GetVolumeId()
	staging, target := n.Client.StagingPath(v.ID), n.Target("a")
	ok(t, os.MkdirAll(staging, 0o750))
	ok(t, os.MkdirAll(filepath.Dir(target), 0o750))
	_, err = node.NodeStageVolume(ctxOf(t), &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: staging,
		VolumeCapability: v.Capability()})
	ok(t, err)
	_, err = node.NodePublishVolume(ctxOf(t), &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: staging, TargetPath: target,
		VolumeCapability: v.Capability(),
		VolumeContext: map[string]string{"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "web-0",
			"csi.storage.k8s.io/serviceAccount.tokens": `{"": {"token": "` + secret + `"}}`}})
	ok(t, err)
	write(t, filepath.Join(target, "content"), secret)
	// A share and a device with a secret in their attributes and options, which are refused.
	for name, wrong := range map[string]csiclient.Volume{
		"share": {ID: "share", Context: map[string]string{"server": "127.0.0.1", "share": "/s"},
			MountFlags: []string{"password=" + secret}},
		"device": {ID: "device", FSType: "ext4", Context: map[string]string{"device": "/dev/loop0", "password": secret}},
		"option": {ID: v.ID, FSType: "ext4", MountFlags: []string{"password=" + secret}},
	} {
		if err := n.Client.Stage(ctxOf(t), wrong); err == nil {
			t.Errorf("%s was staged", name)
		}
	}
	// Misplaced files, and a record with a field of another version.
	state := filepath.Join(n.Dir, "state")
	planted := []string{filepath.Join(state, "token"), filepath.Join(state, "staged", "kubeconfig.json"),
		filepath.Join(n.PoolDir(), "volumes", "token.json")}
	for _, path := range planted {
		ok(t, os.WriteFile(path, []byte(`{"kind": "Config", "users": [{"token": "`+secret+`"}]}`), 0o600))
	}
	ok(t, os.Symlink("/proc/self/environ", filepath.Join(state, "published", "environ.json")))
	planted = append(planted, filepath.Join(state, "published", "environ.json"))
	rec := strings.TrimSuffix(image(n, v.ID), ".img") + ".json"
	whole := read(t, rec)
	ok(t, os.WriteFile(rec,
		[]byte(strings.Replace(whole, `"volume": {`, `"nodeStageSecret": "`+secret+`", "volume": { "password": "`+secret+`",`, 1)), 0o600))

	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	c := exec.Command(testnode.BuildCommand(t, "crustctl", ""), "--endpoint", n.Endpoint(), "--kubelet-dir", n.KubeletDir(),
		"support-bundle", "-o", file,
		"--crust", serveSandbox(t, n.Dir, target))
	c.Env = append(os.Environ(), "TOKEN="+secret, "HTTP_PROXY=http://me:"+secret+"@127.0.0.1:1")
	said, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v %s", err, said)
	}
	parts, names := unpack(t, file)
	if !slices.IsSorted(names) {
		t.Errorf("not in order: %v", names)
	}
	for name, content := range parts {
		if strings.Contains(name+content, secret) {
			t.Errorf("the secret is in %s:\n%s", name, content)
		}
	}
	for name, words := range map[string]string{
		"versions.txt": "csi.crust.dev", "csi-node-flags.txt": "--pool", "kernel.txt": "Linux", "doctor.txt": "loop devices",
		"pools.json": `"pool"`, "volumes.json": "shop/web-0",
		"snapshots.json": "", "operations.json": "", "pool-check.json": "record-unusable", "sandboxes.json": "box-7", "mounts.txt": target,
		"metrics.txt": "crust_pool_available_bytes",
		"audit.jsonl": `"claim":"shop/orders"`, "missing.txt": "kubeconfig.json: not a record of csi-node",
		"records/state/pools/pool.json":                   "crust-csi.known-pool",
		"records/pool-pool/volumes/" + filepath.Base(rec): `"sizeBytes"`,
	} {
		if content, there := parts[name]; !there || !strings.Contains(content, words) {
			t.Errorf("%s: %v, not a word of %q:\n%s", name, there, words, content)
		}
	}
	staged := slices.IndexFunc(names, func(s string) bool { return strings.HasPrefix(s, "records/state/staged/") })
	if staged < 0 || !strings.Contains(parts[names[staged]], v.ID) {
		t.Errorf("no record of what is staged: %v", names)
	}
	if !strings.Contains(string(said), "names of pods, claims") || !strings.Contains(string(said), "audit.jsonl") ||
		strings.Contains(string(said), secret) {
		t.Errorf("it does not say what is inside:\n%s", said)
	}
	st, err := os.Stat(file)
	ok(t, err)
	if st.Mode().Perm() != 0o600 {
		t.Errorf("%s", st.Mode())
	}
	before := read(t, file)
	exits(t, n, 1, []string{"support-bundle", "-o", file}, "not overwritten")
	if read(t, file) != before {
		t.Error("it was overwritten")
	}
	for _, path := range planted {
		ok(t, os.Remove(path))
	}
	ok(t, os.WriteFile(rec, []byte(whole), 0o600))

	// If csi-node is down, the bundle has what there is.
	n.Kill()
	file = filepath.Join(t.TempDir(), "down.tar.gz")
	exits(t, n, 0, []string{"support-bundle", "-o", file, "--state-dir", state}, "missing.txt")
	parts, _ = unpack(t, file)
	if !strings.Contains(parts["audit.jsonl"], v.ID) || !strings.Contains(parts["missing.txt"], "volumes.json") {
		t.Errorf("%v", parts)
	}
	n.Start()
	down(t, n, v.ID, target)
}
