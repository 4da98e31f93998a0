package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"net"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/microvm"
	"github.com/crust-csi/crust-csi/internal/qmp"
	"github.com/crust-csi/crust-csi/internal/vport"
	"github.com/crust-csi/crust-csi/pkg/crust"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/test/virtiofs"
)

// machines are two microVMs: the benchmark talks to one directly, to measure the parts; crustd has
// the other, for the whole.
type machines struct {
	*bench
	crustd        *exec.Cmd
	client        *crust.Client
	parts, whole  *microvm.VM
	q             *qmp.Client
	conn          *grpc.ClientConn
	guest         guestv1.GuestClient
	share, virtio string
}

// crust measures volumes in a microVM.
func (b *bench) crust(guestDir string) {
	m := &machines{bench: b}
	defer m.end()
	m.begin(guestDir)
	m.publish()
	m.fifty()
	m.stats()
	m.fio()
}

func (m *machines) boot(name, dir string, extra ...string) *microvm.VM {
	vm, err := microvm.Start(ctx, microvm.Config{
		Dir: m.dir + "/" + name, Kernel: dir + "/vmlinuz", Initrd: m.dir + "/initramfs", Memory: "1G", DieWithParent: true, Extra: extra,
	})
	must(err)
	return vm
}

func (m *machines) begin(dir string) {
	runtime.LockOSThread() // the machines end with this thread
	m.addFio(dir)
	m.share, m.virtio = m.dir+"/share", m.dir+"/virtiofs.sock"
	must(os.Mkdir(m.share, 0o755))
	_, err := virtiofs.Serve(m.share, m.virtio)
	must(err)
	m.parts = m.boot("parts", dir)
	m.whole = m.boot("whole", dir, "-object", "memory-backend-memfd,id=mem,size=1G,share=on", "-numa", "node,memdev=mem",
		"-chardev", "socket,id=fs,path="+m.virtio, "-device", "vhost-user-fs-pci,chardev=fs,tag=share")
	m.q, err = qmp.Dial(ctx, m.parts.QMP)
	must(err)
	magic, err := hex.DecodeString(m.parts.Magic)
	must(err)
	m.conn, err = grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return vport.Dial(ctx, m.parts.Channel, magic) }))
	must(err)
	m.guest = guestv1.NewGuestClient(m.conn)
	_, err = m.guest.Info(ctx, &guestv1.InfoRequest{})
	must(err)

	m.crustd = exec.Command("bin/crustd", "--endpoint", "unix://"+m.dir+"/crust.sock", "--backend", "qemu", "--state-dir", m.dir+"/crust",
		"--kubelet-dir", m.kubelet, "--allow-device", "/dev/loop*", "-v", "0")
	m.crustd.Stderr, _ = os.Create(m.dir + "/crustd.log")
	m.crustd.SysProcAttr = linux.KilledWithThread()
	must(m.crustd.Start())
	m.client, err = crust.Dial("unix://" + m.dir + "/crust.sock")
	must(err)
	magic, err = hex.DecodeString(m.whole.Magic)
	must(err)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		_, err = m.client.RegisterSandbox(ctx, &crustv1alpha1.RegisterSandboxRequest{SandboxId: "vm", Pid: int64(m.whole.PID),
			Kind: &crustv1alpha1.RegisterSandboxRequest_Qemu{
				Qemu: &crustv1alpha1.QemuSandbox{QmpSocket: m.whole.QMP, ChannelSocket: m.whole.Channel, ChannelMagic: magic}}})
		if err == nil || time.Now().After(deadline) {
			break
		}
	}
	must(err)
	m.exec("true")
	for {
		fs, err := m.client.RuntimeGetSupportedFileSystems(ctx, &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
		must(err)
		if len(fs.GetFileSystems()) > 0 {
			return
		}
	}
}

// addFio appends Debian's fio, with its libraries, to the guest's initramfs.
func (m *machines) addFio(dir string) {
	script := `set -e; t=$(mktemp -d); f=$(command -v fio); mkdir -p $t/usr/bin; cp $f $t/usr/bin/fio
for l in $(ldd $f | grep -oE '/[^ ]+'); do mkdir -p $t$(dirname $l); cp -L $l $t$l; done
(cd $t && find . | cpio --quiet -o -H newc) > $1/more; cat $2/initramfs $1/more > $1/initramfs; rm -rf $t $1/more`
	out, err := exec.Command("sh", "-c", script, "sh", m.dir, dir).CombinedOutput()
	if err != nil {
		must(fmt.Errorf("%w: %s", err, out))
	}
}

func (m *machines) exec(script string) string {
	r, err := m.client.ExecInSandbox(ctx, &crustv1alpha1.ExecInSandboxRequest{SandboxId: "vm", Argv: []string{"/bin/sh", "-c", script}})
	must(err)
	if r.GetExitCode() != 0 {
		must(fmt.Errorf("in the guest: %s: %s", script, r.GetOutput()))
	}
	return string(r.GetOutput())
}

// volume creates and stages an ext4 and returns its device.
func (m *machines) volume(name string, size int64) (id, device, target string) {
	v := csiclient.Volume{FSType: "ext4", Context: map[string]string{"allowRuntimeAssistedMount": "true"}}
	made, err := m.c.Create(ctx, name, size, v, nil, nil)
	must(err)
	v.ID = made.GetVolumeId()
	must(m.c.Stage(ctx, v))
	target = m.kubelet + "/pods/" + name + "/mount"
	must(os.MkdirAll(filepath.Dir(target), 0o755))
	req := &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: m.c.StagingPath(v.ID), TargetPath: target,
		VolumeCapability: v.Capability(), VolumeContext: v.Context}
	must(crust.SetSupportedFilesystems(req, []string{"ext4"}))
	resp, err := m.c.NodePublishVolume(ctx, req)
	must(err)
	info, ok, err := crust.MountInfoOf(resp)
	must(err)
	if !ok {
		must(errors.New("not deferred"))
	}
	return v.ID, info.Source, target
}

func (m *machines) remove(id, target string) {
	must(m.c.Unpublish(ctx, id, target))
	must(m.c.Unstage(ctx, id))
	must(m.c.Delete(ctx, id))
}

func (m *machines) put(device, target string) {
	_, err := m.client.RuntimePublishVolume(ctx,
		&crustv1alpha1.RuntimePublishVolumeRequest{SandboxId: "vm", HostVolumeId: device, HostTargetPath: target, FileSystem: "ext4"})
	must(err)
}

func (m *machines) take(device string) {
	_, err := m.client.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: "vm", HostVolumeId: device})
	must(err)
}

// publish compares RuntimePublishVolume with its parts: QEMU takes the disk, the guest sees it, the
// guest mounts it.
func (m *machines) publish() {
	s := series{}
	id, device, target := m.volume("one", 64<<20)
	for i := range 15 {
		serial := fmt.Sprintf("part-%d", i)
		seen := make(chan error, 1)
		// The guest polls in its own loop, which starts before the disk is there.
		go func() {
			_, err := m.guest.Exec(ctx, &guestv1.ExecRequest{Argv: []string{"/bin/sh", "-c",
				"touch /tmp/ready" + serial + "; while ! grep -aqs '" + serial + "$' /sys/block/sd*/device/vpd_pg80 && ! grep -aqs '" +
					serial + "' /sys/block/sd*/device/vpd_pg80; do :; done"}})
			seen <- err
		}()
		time.Sleep(150 * time.Millisecond)
		var set struct {
			ID int `json:"fdset-id"`
		}
		s.time("visible", func() {
			s.time("device_add", func() {
				f, err := os.OpenFile(device, os.O_RDWR, 0)
				must(err)
				defer f.Close()
				must(m.q.RunWithFile(ctx, "add-fd", map[string]any{"opaque": serial}, &set, f))
				must(m.q.Run(ctx, "blockdev-add", map[string]any{"driver": "host_device", "node-name": serial,
					"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "cache": map[string]any{"direct": true}}, nil))
				must(m.q.Run(ctx, "device_add",
					map[string]any{"driver": "scsi-hd", "id": serial, "drive": serial, "bus": "crust-scsi.0", "serial": serial}, nil))
			})
			must(<-seen)
		})
		time.Sleep(100 * time.Millisecond)
		s.time("mount", func() {
			_, err := m.guest.Mount(ctx, &guestv1.MountRequest{Serial: serial, FileSystem: "ext4"})
			must(err)
		})
		_, err := m.guest.Unmount(ctx, &guestv1.UnmountRequest{Serial: serial})
		must(err)
		events, stop := m.q.Events()
		must(m.q.Run(ctx, "device_del", map[string]any{"id": serial}, nil))
		for e := range events {
			if e.Name == "DEVICE_DELETED" {
				break
			}
		}
		stop()
		must(m.q.Run(ctx, "blockdev-del", map[string]any{"node-name": serial}, nil))
		must(m.q.Run(ctx, "remove-fd", map[string]any{"fdset-id": set.ID}, nil))
		s.time("whole", func() { m.put(device, target) })
		s.time("unpublish", func() { m.take(device) })
	}
	m.remove(id, target)
	sum := s.median("visible") + s.median("mount")
	m.row("RuntimePublishVolume of an ext4 into a microVM", "its parts: device_add until seen in the guest, mount", sum,
		s.median("whole"), 1.3, false)
	for _, part := range []string{"device_add", "visible", "mount", "unpublish"} {
		fmt.Printf("| of it: %s | | %s | | |\n", strings.Replace(part, "visible", "device_add until the guest sees it", 1),
			s.median(part).Round(time.Microsecond))
	}
}

// fifty publishes one volume after another into one machine.
func (m *machines) fifty() {
	const n = 50
	type vol struct{ id, device, target string }
	var vols []vol
	for i := range n {
		id, device, target := m.volume(fmt.Sprint("fifty-", i), 16<<20)
		vols = append(vols, vol{id, device, target})
	}
	s := series{}
	for i, v := range vols {
		name := "middle"
		if i < 5 {
			name = "first"
		} else if i >= n-5 {
			name = "last"
		}
		s.time(name, func() { m.put(v.device, v.target) })
	}
	m.row(fmt.Sprintf("%d volumes in one microVM: publish of the last five", n), "of the first five", s.median("first"),
		s.median("last"), 1.5, false)
	for _, v := range vols {
		m.take(v.device)
		m.remove(v.id, v.target)
	}
}

// stats compares a volume's stats with an empty call to the same guest.
func (m *machines) stats() {
	s := series{}
	id, device, target := m.volume("stats", 64<<20)
	m.put(device, target)
	for range 100 {
		s.time("empty", func() {
			_, err := m.client.ExecInSandbox(ctx, &crustv1alpha1.ExecInSandboxRequest{SandboxId: "vm"}) // the guest refuses it at once
			if status.Code(err) != codes.InvalidArgument {
				must(err)
			}
		})
		s.time("stats", func() {
			_, err := m.client.RuntimeGetVolumeStats(ctx,
				&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: "vm", HostVolumeId: device})
			must(err)
		})
		s.time("channel", func() {
			if err := m.conn.Invoke(ctx, "/crust.guest.v1.Guest/Nothing",
				&emptypb.Empty{}, &emptypb.Empty{}); status.Code(err) != codes.Unimplemented {
				must(err)
			}
		})
	}
	m.row("RuntimeGetVolumeStats", "an empty call to the same guest", s.median("empty"), s.median("stats"), 2, false)
	fmt.Printf("| an empty call over the virtio-serial channel alone | | %s | | |\n", s.median("channel").Round(time.Microsecond))
	m.take(device)
	m.remove(id, target)
}

// fio compares a published volume with the same bytes shared by virtiofs, a comparison that the KEP
// makes without numbers.
func (m *machines) fio() {
	id, device, target := m.volume("fio", 512<<20)
	m.put(device, target)
	list, err := m.client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	must(err)
	at := list.GetSandboxes()[0].GetVolumes()[0].GetSandboxPath()
	m.exec("mkdir -p /mnt/share && (modprobe virtiofs || true) && mount -t virtiofs share /mnt/share")
	run := func(dir, rw, bs string) float64 {
		out := m.exec(fmt.Sprintf("fio --name=x --filename=%s/fio --size=64M --rw=%s --bs=%s --ioengine=psync --direct=0 --end_fsync=1 --time_based --runtime=4 --ramp_time=1 --output-format=json 2>/dev/null", dir, rw, bs))
		var r struct {
			Jobs []struct {
				Read, Write struct {
					BW float64 `json:"bw_bytes"`
				}
			}
		}
		must(json.Unmarshal([]byte(out[strings.Index(out, "{"):]), &r))
		return r.Jobs[0].Read.BW + r.Jobs[0].Write.BW
	}
	for _, c := range [][3]string{{"randread", "4k", "4 KiB random read"}, {"randwrite", "4k", "4 KiB random write"},
		{"read", "1M", "1 MiB sequential read"}, {"write", "1M", "1 MiB sequential write"}} {
		for _, dir := range []string{at, "/mnt/share"} {
			m.exec("dd if=/dev/zero of=" + dir + "/fio bs=1M count=64 2>/dev/null; sync; echo 3 > /proc/sys/vm/drop_caches")
		}
		block, shared := run(at, c[0], c[1]), run("/mnt/share", c[0], c[1])
		fmt.Printf("| fio in the guest: %s, the volume | the same by virtiofs | %.1f MB/s against %.1f MB/s | %.3g | no target |\n", c[2],
			block/1e6, shared/1e6, block/shared)
	}
	m.exec("umount /mnt/share")
	m.take(device)
	m.remove(id, target)
}

func (m *machines) end() {
	if m.client != nil {
		_, _ = m.client.DeregisterSandbox(ctx, &crustv1alpha1.DeregisterSandboxRequest{SandboxId: "vm"})
		m.client.Close()
	}
	if m.crustd != nil {
		_ = m.crustd.Process.Signal(os.Interrupt)
		_ = m.crustd.Wait()
	}
	for _, vm := range []*microvm.VM{m.parts, m.whole} {
		if vm != nil {
			vm.Kill()
		}
	}
}
