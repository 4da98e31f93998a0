package crust

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/testnode"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// withGuest returns an initramfs with another crust-guest.
func withGuest(t *testing.T, program string) string {
	t.Helper()
	dir := t.TempDir()
	ok(t, os.Mkdir(dir+"/tree", 0o755))
	run(t, "cp", program, dir+"/tree/init")
	return withTree(t, dir)
}

// A microVM keeps the crust-guest that it booted with, through upgrades and downgrades of crustd.
func TestAGuestOfAReleaseUnderTodaysCrustdAndTheOtherWay(t *testing.T) {
	t.Parallel()
	for _, release := range testnode.Releases(t) {
		old := testnode.ReleaseDir(t, release)
		today := testnode.BuildCommand(t, "crustd", "")
		for name, c := range map[string]struct{ first, then, guest string }{
			"a guest of " + release:  {today, filepath.Join(old, "crustd"), filepath.Join(old, "crust-guest")},
			"a crustd of " + release: {filepath.Join(old, "crustd"), today, ""},
		} {
			t.Run(name, func(t *testing.T) {
				s := newServer(t, "qemu", "")
				if c.guest != "" {
					s.initrd = withGuest(t, c.guest)
				}
				s.Become(c.first)
				v := s.Volume("stays", "xfs")
				p := s.pod("stays", v)
				group := uint32(4242)
				p.group, p.asks.Group = &group, true
				m := s.start(p, "q35", "")
				// crustd of v0.1.0 gives up after a minute, and a boot may take longer on this machine.
				ok(t, m.vm.Answers(ctxOf(t)))
				m.register()
				s.hasAsked(m)
				ok(t, s.nodePublish(p))
				ok(t, s.runtimePublish(p))
				at := m.Path(p.target)
				sh(t, m, "echo word >%s/f && sync", at)
				for _, crustd := range []string{c.then, c.first, c.then} {
					s.Become(crustd)
					ok(t, s.runtimePublish(p))
					_, err := s.Client.RuntimeGetVolumeStats(ctxOf(t), &crustv1alpha1.RuntimeGetVolumeStatsRequest{
						SandboxId: p.name, HostVolumeId: p.info.Source,
					})
					ok(t, err)
					if now := m.Path(p.target); now != at {
						t.Errorf("the volume was at %s in the guest, and is at %s", at, now)
					}
					if got := sh(t, m, "cat %s/f", at); got != "word" {
						t.Errorf("read %q", got)
					}
				}
				if out := sh(t, m, "stat -c %%g %s/f", at); out != "4242" {
					t.Errorf("a file has group %s", out)
				}
				_, err := s.Node.Client.ControllerExpandVolume(ctxOf(t), &csi.ControllerExpandVolumeRequest{
					VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * size},
				})
				ok(t, err)
				grown, err := s.Client.RuntimeExpandVolume(ctxOf(t), &crustv1alpha1.RuntimeExpandVolumeRequest{
					SandboxId: p.name, HostVolumeId: p.info.Source, RequiredBytes: 2 * size,
				})
				ok(t, err)
				if grown.GetCapacityBytes() != 2*size {
					t.Errorf("the guest has grown it to %d bytes", grown.GetCapacityBytes())
				}
				s.deregister(p)
				s.nodeUnpublish(p)
				s.Delete(v)
			})
		}
	}
}
