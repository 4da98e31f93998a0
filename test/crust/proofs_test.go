package crust

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// sameAsStatfs compares the runtime's volume stats with statfs in its sandbox.
func sameAsStatfs(t *testing.T, s *server, p *pod, sb sandboxed, fstype string) {
	t.Helper()
	sh(t, sb, "sync")
	st, err := s.Client.RuntimeGetVolumeStats(ctxOf(t),
		&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
	ok(t, err)
	var n []int64
	for _, field := range strings.Fields(sh(t, sb, "stat -f -c '%%s %%b %%f %%a %%c %%d' %s", sb.Path(p.target))) {
		value, err := strconv.ParseInt(field, 10, 64)
		ok(t, err)
		n = append(n, value)
	}
	size, blocks, free, available, inodes, inodesFree := n[0], n[1], n[2], n[3], n[4], n[5]
	want := map[crustv1alpha1.VolumeUsage_Unit][3]int64{crustv1alpha1.VolumeUsage_BYTES: {blocks * size, available * size,
		(blocks - free) * size}}
	if fstype != "btrfs" { // btrfs counts no inodes
		want[crustv1alpha1.VolumeUsage_INODES] = [3]int64{inodes, inodesFree, inodes - inodesFree}
	}
	if len(st.GetUsage()) != len(want) {
		t.Errorf("%s: usage %v", fstype, st.GetUsage())
	}
	for _, u := range st.GetUsage() {
		got := [3]int64{u.GetTotal(), u.GetAvailable(), u.GetUsed()}
		for i, of := range []string{"total", "available", "used"} {
			if got[i] != want[u.GetUnit()][i] {
				t.Errorf("%s: %s %s is %d, statfs in the sandbox says %d", fstype, u.GetUnit(), of, got[i], want[u.GetUnit()][i])
			}
		}
	}
}

// statsOfEach compares the stats of a volume of each file system, empty and with files.
func statsOfEach(t *testing.T, s *server, boot func(*pod) sandboxed) {
	for _, fstype := range filesystems {
		v := s.Volume(fstype, fstype)
		p := s.pod("pod-"+fstype, v)
		ok(t, s.nodePublish(p))
		sb := boot(p)
		ok(t, s.runtimePublish(p))
		sameAsStatfs(t, s, p, sb, fstype)
		sh(t, sb, "cd %s && dd if=/dev/urandom of=data bs=65536 count=96 2>/dev/null && mkdir d && for i in 1 2 3 4 5 6 7 8 9; do touch d/$i; done", sb.Path(p.target))
		sameAsStatfs(t, s, p, sb, fstype)
		s.deregister(p)
		s.nodeUnpublish(p)
		s.Delete(v)
	}
}

func TestC16_StatsAreStatfsInTheSandbox(t *testing.T) {
	s := newServer(t, "namespace", "")
	statsOfEach(t, s, func(p *pod) sandboxed { return s.namespace(p) })
}

// C11, C13 and C16 in a sandbox with its own kernel. One guest plays all sandboxes in turn.
func TestC11_C13_C16_InAMicroVM(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	var m *machine
	boot := func(p *pod) sandboxed {
		if m == nil {
			m = s.boot(p, "q35", "")
			return m
		}
		m.id = p.name
		m.register()
		return m
	}
	first := &pod{name: "first"}
	boot(first)
	p := s.pod("none", s.Volume("none", "ext4"))
	for deadline := time.Now().Add(testcrust.Longest()); len(p.asks.Filesystems) == 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the guest does not tell its file systems")
		}
		p.asks.Capabilities = nil
		s.decide(p)
	}
	want := []crust.Capability{
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS,
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH,
		crustv1alpha1.RuntimeCapability_RPC_SUBPATH, crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS,
		crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE,
	}
	if strings.Contains(sh(t, m, "cat /proc/filesystems"), "selinuxfs") {
		want = append(want, crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT)
	}
	slices.Sort(want)
	got := slices.Clone(p.asks.Capabilities)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the capabilities are %v, and a guest of this kernel can %v", got, want)
	}
	s.Delete(p.v)
	s.deregister(first)
	statsOfEach(t, s, boot) // loads the modules
	last := &pod{name: "last"}
	boot(last)
	kernel := strings.Fields(sh(t, m, "cat /proc/filesystems"))
	for _, fstype := range []string{"ext2", "ext3", "ext4", "xfs", "btrfs", "exfat", "ntfs3"} {
		if has, offers := slices.Contains(kernel, fstype), slices.Contains(p.asks.Filesystems, fstype); has != offers {
			t.Errorf("%s: the guest's kernel has it: %v; it is offered: %v", fstype, has, offers)
		}
	}
	s.deregister(last)
	givenToTheGroup(t, s, boot)
}

// givenToTheGroup checks what each policy leaves of deliberately wrong files in the sandbox.
func givenToTheGroup(t *testing.T, s *server, boot func(*pod) sandboxed) {
	group := uint32(4242)
	for _, c := range []struct {
		name, policy string
		known        bool   // the group was applied before, and is on record
		want         string // group of the wrong file
	}{
		{"a first time", "OnRootMismatch", false, "4242"},
		{"a first time, always", "Always", false, "4242"},
		{"again", "OnRootMismatch", true, "7"},
		{"again, by default", "", true, "7"},
		{"again, always", "Always", true, "4242"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := s.Volume(c.name, "ext4")
			host := v
			if c.known {
				host.Group = "4242"
			}
			at := s.Node.Target("host")
			ok(t, s.Node.Client.Publish(ctxOf(t), host, at, false))
			ok(t, os.MkdirAll(at+"/d/deep", 0o755))
			ok(t, os.WriteFile(at+"/d/deep/f", nil, 0o600))
			ok(t, os.Lchown(at+"/d/deep/f", 1000, 7))
			ok(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, at))
			p := s.pod("pod-"+strings.NewReplacer(" ", "-", ",", "").Replace(c.name), v)
			p.group, p.asks.Group, p.asks.GroupPolicy = &group, true, c.policy
			ok(t, s.nodePublish(p))
			if !p.deferred {
				t.Fatal("not deferred")
			}
			sb := boot(p)
			ok(t, s.runtimePublish(p))
			in := sb.Path(p.target)
			if out := sh(t, sb, "stat -c '%%u %%g' %s/d/deep/f", in); out != "1000 "+c.want {
				t.Errorf("a file deep in the volume is of %q, want group %s", out, c.want)
			}
			if out := sh(t, sb, "stat -c %%g %s", in); out != "4242" {
				t.Errorf("the root has group %s", out)
			}
			if c.want == "4242" {
				if out := sh(t, sb, "stat -c %%a %s/d/deep/f", in); out != "660" {
					t.Errorf("the file has mode %s", out)
				}
			}
			s.deregister(p)
			s.nodeUnpublish(p)
			s.Delete(v)
		})
	}
}

func TestC13_F05_TheGroupInASandbox(t *testing.T) {
	s := newServer(t, "namespace", "")
	givenToTheGroup(t, s, func(p *pod) sandboxed { return s.namespace(p) })
}

// C11 and C12, compared with the kernel's own tables.
func TestC11_C12_WhatTheKernelSays(t *testing.T) {
	s := newServer(t, "namespace", "")
	p := s.pod("none", s.Volume("a", "ext4"))
	s.decide(p) // queries the runtime
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return string(b)
	}
	var has, may []string
	for line := range strings.Lines(read("/proc/filesystems")) {
		if f := strings.Fields(line); len(f) == 1 {
			has = append(has, f[0])
		}
	}
	for line := range strings.Lines(read("/lib/modules/" + strings.TrimSpace(read("/proc/sys/kernel/osrelease")) + "/modules.alias")) {
		if name, found := strings.CutPrefix(line, "alias fs-"); found {
			may = append(may, strings.Fields(name)[0])
		}
	}
	for _, fs := range p.asks.Filesystems {
		if !slices.Contains(has, fs) && !slices.Contains(may, fs) {
			t.Errorf("%s is offered, and this kernel does not have it", fs)
		}
	}
	for _, fs := range []string{"ext2", "ext3", "ext4", "xfs", "btrfs", "vfat", "exfat", "ntfs3"} {
		if slices.Contains(has, fs) && !slices.Contains(p.asks.Filesystems, fs) {
			t.Errorf("%s is not offered: %v", fs, p.asks.Filesystems)
		}
	}
	// Of those, the ones that it grows while they are mounted.
	supported, err := s.Client.RuntimeGetSupportedFileSystems(ctxOf(t), &crustv1alpha1.RuntimeGetSupportedFileSystemsRequest{})
	ok(t, err)
	for fs, grows := range map[string]bool{"ext4": mayGrowExt4(t), "xfs": true, "btrfs": true, "vfat": false, "exfat": false} {
		if slices.Contains(supported.GetGrowingFileSystems(), fs) != (grows && slices.Contains(supported.GetFileSystems(), fs)) {
			t.Errorf("of %v, these are to grow: %v", supported.GetFileSystems(), supported.GetGrowingFileSystems())
		}
	}
	want := []crust.Capability{
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ALWAYS,
		crustv1alpha1.RuntimeCapability_RPC_FS_GROUP_CHANGE_POLICY_ROOT_MISMATCH,
		crustv1alpha1.RuntimeCapability_RPC_SUBPATH, crustv1alpha1.RuntimeCapability_RPC_VOLUME_STATS,
		crustv1alpha1.RuntimeCapability_RPC_HOST_KERNEL,
	}
	if mayGrowExt4(t) {
		want = append(want, crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE)
	}
	if strings.Contains(read("/proc/filesystems"), "selinuxfs") {
		want = append(want, crustv1alpha1.RuntimeCapability_RPC_SELINUX_RELABEL_ON_MOUNT)
	}
	slices.Sort(want)
	got := slices.Clone(p.asks.Capabilities)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the capabilities are %v, and the kernel allows for %v", got, want)
	}
	s.Delete(p.v)
}

// mayGrowExt4 reports whether this process has CAP_SYS_RESOURCE. Without it the kernel grows no
// mounted ext4.
func mayGrowExt4(t *testing.T) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	ok(t, err)
	_, rest, _ := strings.Cut(string(b), "CapEff:\t")
	caps, err := strconv.ParseUint(strings.Fields(rest)[0], 16, 64)
	ok(t, err)
	const capSysResource = 24
	return caps&(1<<capSysResource) != 0
}

// C17, C22: xfs and btrfs grow in a namespace without CAP_SYS_RESOURCE too.
func TestC17_C22_GrowthInANamespace(t *testing.T) {
	s := newServer(t, "namespace", "")
	for _, fstype := range filesystems {
		if fstype == "ext4" && !mayGrowExt4(t) {
			continue
		}
		v := s.Volume(fstype, fstype)
		p := s.pod("pod-"+fstype, v)
		ok(t, s.nodePublish(p))
		sb := s.namespace(p)
		ok(t, s.runtimePublish(p))
		blocks := func() int64 {
			n, err := strconv.ParseInt(sh(t, sb, "stat -f -c %%b %s", p.target), 10, 64)
			ok(t, err)
			return n
		}
		before := blocks()
		_, err := s.Node.Client.ControllerExpandVolume(ctxOf(t),
			&csi.ControllerExpandVolumeRequest{VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}})
		ok(t, err)
		req := &csi.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: p.target,
			CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size}}
		ok(t, crust.SetSupportsExpand(req, true))
		_, err = s.Node.Client.NodeExpandVolume(ctxOf(t), req)
		ok(t, err)
		if now := blocks(); now != before {
			t.Errorf("%s: the node grew it from %d to %d blocks", fstype, before, now)
		}
		r, err := s.Client.RuntimeExpandVolume(ctxOf(t),
			&crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source, RequiredBytes: 2 * size})
		ok(t, err)
		if now := blocks(); now < before*3/2 || r.GetCapacityBytes() != 2*size {
			t.Errorf("%s: %d blocks, %d before; capacity %d", fstype, now, before, r.GetCapacityBytes())
		}
		sameAsStatfs(t, s, p, sb, fstype)
		s.deregister(p)
		s.nodeUnpublish(p)
		s.Delete(v)
	}
}

// R05: the mount in the sandbox has the read-only flag, whatever the superblock says.
func TestR05_TheMountInTheSandboxIsReadOnly(t *testing.T) {
	s := newServer(t, "namespace", "")
	for _, fstype := range filesystems {
		v := s.Volume(fstype, fstype)
		p := s.pod("pod-"+fstype, v)
		p.ro = true
		ok(t, s.nodePublish(p))
		sb := s.namespace(p)
		ok(t, s.runtimePublish(p))
		line := sh(t, sb, "grep ' %s ' /proc/self/mountinfo", p.target)
		if options := strings.Fields(line)[5]; !strings.HasPrefix(options, "ro") {
			t.Errorf("%s: the mount's own options are %q", fstype, options)
		}
		for _, command := range []string{"touch %s/f", "mkdir %s/d", "chmod 700 %s", "chown 1 %s"} {
			if out, err := sb.Exec(fmt.Sprintf(command, p.target)); err == nil || !strings.Contains(out, "Read-only file system") {
				t.Errorf("%s: %s: %v %s", fstype, command, err, out)
			}
		}
		s.deregister(p)
		s.nodeUnpublish(p)
		s.Delete(v)
	}
}
