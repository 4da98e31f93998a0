package driver_test

import (
	"context"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/driver"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
	"github.com/crust-csi/crust-csi/pkg/volume/looppool"
	"github.com/crust-csi/crust-csi/pkg/volume/poolhome"
	"github.com/crust-csi/crust-csi/pkg/volume/static"
)

// rig is a node with real loop devices, whose driver can be stopped and started. It has one pool, p, on a disk that may be away, and
// static volumes of any loop device.
type rig struct {
	t    *testing.T
	dir  string
	root *mounter.Root
	pool string // the name of the pool that is configured
	d    *driver.Driver
	p    *poolhome.Pool
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir := t.TempDir()
	root, err := mounter.OpenRoot(dir)
	must(t, err)
	r := &rig{t: t, dir: dir, root: root, pool: "p"}
	r.start()
	t.Cleanup(func() {
		r.stop()
		root.Close()
		// What a test that failed has left: mounts, then devices on devices.
		_ = exec.Command("sh", "-c", "awk -v d="+dir+`/ 'index($5, d) == 1 {print $5}' /proc/self/mountinfo | sort -r | xargs -rn1 umount
			for i in 1 2; do losetup -nO NAME,BACK-FILE | awk -v d=`+dir+`/ 'index($2, d) == 1 || $2 in own {own[$1]; print $1}' |
			xargs -rn1 losetup -d; done`).Run()
	})
	return r
}

func (r *rig) start() {
	r.t.Helper()
	pool, nodes := filepath.Join(r.dir, r.pool), r.dir+"/dev"
	p, err := poolhome.Open(poolhome.Options{Name: r.pool, Dir: pool, State: r.dir + "/state/pools", Foreign: looppool.Foreign(nodes),
		Open: func() (volume.Pool, error) {
			return looppool.Open(looppool.Options{Name: r.pool, Dir: pool, NodesDir: nodes, Reserve: 1 << 20,
				Log: slog.New(slog.DiscardHandler)})
		}})
	must(r.t, err)
	src, err := static.Open(static.Options{Dir: r.dir + "/static", Allow: []string{"/dev/loop*", r.dir + "/node-*"},
		NodesDir: nodes,
		Claimed:  func(d mounter.Device) (string, bool, error) { return volume.OwnerOfDevice([]volume.Pool{p}, d) }})
	must(r.t, err)
	volumes, err := volume.NewRegistry(src, p)
	must(r.t, err)
	r.d, err = driver.New(driver.Config{Name: "x", NodeID: "n", StateDir: r.dir + "/state", Root: r.root, Volumes: volumes, Defers: true,
		Left: func(id string) volume.Releaser {
			return looppool.Left(id, nodes, func(d mounter.Device) (bool, error) {
				_, ok, err := volume.AvailableOwnerOfDevice([]volume.Pool{p}, d)
				return ok, err
			})
		}})
	must(r.t, err)
	r.p = p
}

func (r *rig) stop() {
	r.d.Drain(context.Background())
	r.p.Close()
}

// diskAway takes the pool's disk away, and diskBack brings it back.
func (r *rig) diskAway() { must(r.t, os.Rename(r.dir+"/p/pool.json", r.dir+"/pool.json")) }
func (r *rig) diskBack() { must(r.t, os.Rename(r.dir+"/pool.json", r.dir+"/p/pool.json")) }

func fileSystem(fs string) *csi.VolumeCapability {
	c := rawBlock()
	c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fs}}
	return c
}

func rawBlock() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
}

// create creates a volume. No other test has one of that id: volumes of pools that are not configured are found by the names of their
// files.
func (r *rig) create(name string, c *csi.VolumeCapability, size int64) (id string) {
	r.t.Helper()
	v, err := r.d.CreateVolume(r.t.Context(), &csi.CreateVolumeRequest{Name: name + r.dir, VolumeCapabilities: []*csi.VolumeCapability{c},
		CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
	must(r.t, err)
	return v.GetVolume().GetVolumeId()
}

func (r *rig) staging(id string) string { return filepath.Join(r.dir, "staging-"+id) }

// stage stages a volume. A static one has a device.
func (r *rig) stage(id string, c *csi.VolumeCapability, device ...string) error {
	must(r.t, os.MkdirAll(r.staging(id), 0o755))
	_, err := r.d.NodeStageVolume(r.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: r.staging(id),
		VolumeCapability: c, VolumeContext: attributes(device)})
	return err
}

func attributes(device []string) map[string]string {
	if len(device) == 0 {
		return nil
	}
	return map[string]string{"device": device[0]}
}

// publish publishes a staged volume at a target with that name.
func (r *rig) publish(id, name string, c *csi.VolumeCapability, readOnly bool, device ...string) (target string, err error) {
	target = filepath.Join(r.dir, name)
	_, err = r.d.NodePublishVolume(r.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: r.staging(id),
		TargetPath: target, VolumeCapability: c, VolumeContext: attributes(device), Readonly: readOnly})
	return target, err
}

func (r *rig) unpublish(id, target string) error {
	_, err := r.d.NodeUnpublishVolume(r.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	return err
}

func (r *rig) unstage(id string) error {
	_, err := r.d.NodeUnstageVolume(r.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: r.staging(id)})
	return err
}

// inventory returns the targets of each volume, as crustctl sees them.
func (r *rig) inventory() map[string][]string {
	r.t.Helper()
	pipe := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	r.d.RegisterInventory(server)
	go func() { _ = server.Serve(pipe) }() // until it is stopped
	defer server.Stop()
	conn, err := grpc.NewClient("passthrough:///rig", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	must(r.t, err)
	defer conn.Close()
	list, err := inventory.NewInventoryClient(conn).DescribeVolumes(r.t.Context(), &inventory.DescribeVolumesRequest{})
	must(r.t, err)
	targets := map[string][]string{}
	for _, v := range list.GetVolumes() {
		for _, u := range v.GetUses() {
			targets[v.GetId()] = append(targets[v.GetId()], u.GetTarget())
		}
	}
	return targets
}

// disk makes a loop device of its own, for a static volume. It has a file system if mkfs is not empty.
func (r *rig) disk(name, mkfs string) (device string) {
	r.t.Helper()
	file := filepath.Join(r.dir, name)
	device = shell(r.t, "truncate -s 64M "+file+"; "+mkfs+" && losetup -f --show "+file)
	return device
}

func shell(t *testing.T, line string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", line).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
	return strings.TrimSpace(string(out))
}
