package crust

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// failing is a microVM whose agent has failpoints. They are switched through it.
type failing struct{ *machine }

const guestPoints = "/run/failpoint" // CRUST_FAILPOINT_FILE in the guest

// withFailpoints makes the server's guests such.
func (s *server) withFailpoints(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	ok(t, os.Mkdir(dir+"/tree", 0o755))
	run(t, "env", "CGO_ENABLED=0", "go", "build", "-tags", "failpoint", "-ldflags", "-s -w", "-o", dir+"/tree/init", "../../cmd/crust-guest")
	run(t, "sh", "-c", fmt.Sprintf("cd %s/tree && find . | cpio --quiet -o -H newc > ../more && cat %s/initramfs ../more > ../initramfs", dir, guestDir(t)))
	s.initrd = dir + "/initramfs"
}

// script runs a shell command in the guest; an agent that has been killed is waited for.
func (f failing) script(command string) string {
	f.t.Helper()
	for end := time.Now().Add(longest); ; time.Sleep(20 * time.Millisecond) {
		out, err := f.exec(command)
		if err == nil {
			return strings.TrimSpace(out)
		}
		if time.Now().After(end) {
			f.t.Fatalf("in the guest: %s: %v\n%s", command, err, out)
		}
	}
}

func (f failing) set(point, mode string) {
	f.t.Helper()
	f.script(fmt.Sprintf("rm -f %[1]s.hit; echo '%[2]s %[3]s' > %[1]s.new && mv %[1]s.new %[1]s", guestPoints, point, mode))
}

func (f failing) off() {
	f.t.Helper()
	f.script(fmt.Sprintf("echo none > %[1]s.new && mv %[1]s.new %[1]s", guestPoints))
}

func (f failing) reached() bool {
	f.t.Helper()
	return f.script("test -e "+guestPoints+".hit && echo yes || echo no") == "yes"
}

// life gives the volume to the sandbox, looks at it and takes it back. Calls that fail
// are made again; failed is told of each.
func (f failing) life(ctx context.Context, p *pod, failed func()) error {
	again := func(call func() error) error {
		for {
			err := call()
			if err == nil {
				return nil
			}
			failed()
			if ctx.Err() != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	c := f.s.client
	for _, call := range []func() error{
		func() error { _, err := c.RuntimePublishVolume(ctx, p.request()); return err },
		func() error {
			r, err := c.RuntimeGetVolumeStats(ctx, &crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
			if err == nil && len(r.GetUsage()) == 0 {
				err = fmt.Errorf("no usage")
			}
			return err
		},
		func() error {
			out, err := f.exec("cat " + f.path(p.target) + "/word")
			if err == nil && strings.TrimSpace(out) != p.name {
				f.t.Errorf("the guest reads %q", out)
			}
			if mounts := f.script("grep -c ' /run/crust/volumes/' /proc/self/mountinfo"); mounts != "1" {
				f.t.Errorf("the volume is mounted %s times", mounts)
			}
			return err
		},
		func() error {
			_, err := c.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
			return err
		},
	} {
		if err := again(call); err != nil {
			return err
		}
	}
	if left := f.script("ls -A /run/crust/volumes; grep -c ' /run/crust/volumes/' /proc/self/mountinfo || true"); left != "0" {
		return fmt.Errorf("left in the guest: %s", left)
	}
	return nil
}

// TestGuestErrorKillOrHangAtEveryStep has each step of the agent in a microVM fail in
// turn, kill it, and hang: the sandbox gets its volume all the same. While it hangs, a
// second call on the volume is answered, and another microVM is served.
func TestGuestErrorKillOrHangAtEveryStep(t *testing.T) {
	s := newServer(t, "qemu", "")
	s.acquaint()
	s.withFailpoints(t)
	give := func(name string) (*pod, failing) {
		v := s.volume(name, "ext4")
		t.Cleanup(func() { s.delete(v) })
		target := s.node.Target("before-" + name)
		ok(t, s.node.Client.Publish(ctxOf(t), v, target, false))
		ok(t, os.WriteFile(target+"/word", []byte(name), 0o600))
		ok(t, s.node.Client.Unpublish(ctxOf(t), v.ID, target))
		p := s.pod(name, v)
		ok(t, s.nodePublish(p))
		t.Cleanup(func() { s.nodeUnpublish(p) })
		return p, failing{s.boot(p, "q35", "CRUST_FAILPOINT_FILE="+guestPoints)}
	}
	p, f := give("guest-a")
	q, other := give("guest-b")
	t.Cleanup(func() { s.deregister(p); s.deregister(q) })
	points := append(failpoints(t, "../../cmd/crust-guest"), "mount.detached", "attach.before", "attach.after")
	if len(points) < 7 {
		t.Fatalf("crust-guest has only %v", points)
	}
	for _, point := range points {
		for _, mode := range []string{"error", "kill"} {
			if mode == "error" && point == "attach.after" {
				continue // it cannot fail
			}
			t.Run(mode+"/"+point, func(t *testing.T) {
				f.set(point, mode)
				ok(t, f.life(ctxOf(t), p, func() {
					if f.reached() {
						f.off()
					}
				}))
				if !f.reached() {
					t.Error("the step was not reached")
				}
				f.off()
			})
		}
		t.Run("hang/"+point, func(t *testing.T) {
			f.set(point, "hang")
			ended := make(chan error, 1)
			go func() { ended <- f.life(ctxOf(t), p, func() {}) }()
			for !f.reached() && len(ended) == 0 {
				time.Sleep(20 * time.Millisecond)
			}
			if !f.reached() {
				t.Error("the step was not reached")
			}
			if _, err := s.client.RuntimePublishVolume(ctxOf(t), p.request()); status.Code(err) != codes.Aborted {
				t.Errorf("a second call on the volume: %v", err)
			}
			if err := other.life(ctxOf(t), q, func() {}); err != nil {
				t.Errorf("while it hangs, another microVM: %v", err)
			}
			f.off()
			ok(t, <-ended)
		})
	}
}
