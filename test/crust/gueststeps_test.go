package crust

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// failing is a microVM whose agent has failpoints. Commands in the guest switch them.
type failing struct{ *machine }

const guestPoints = "/run/failpoint" // CRUST_FAILPOINT_FILE in the guest

// script runs a shell command in the guest. It waits for a killed agent's successor.
func (f failing) script(command string) (string, error) {
	for end := time.Now().Add(testcrust.Longest()); ; time.Sleep(20 * time.Millisecond) {
		out, err := f.Exec(command)
		if err == nil || time.Now().After(end) {
			return strings.TrimSpace(out), err
		}
	}
}

func (f failing) write(t *testing.T, text string) {
	t.Helper()
	_, err := f.script(fmt.Sprintf("echo '%[2]s' > %[1]s.new && mv %[1]s.new %[1]s", guestPoints, text))
	ok(t, err)
}

func (f failing) set(t *testing.T, point, mode string) {
	t.Helper()
	_, err := f.script("rm -f " + guestPoints + ".hit")
	ok(t, err)
	f.write(t, point+" "+mode)
}

func (f failing) off(t *testing.T) { t.Helper(); f.write(t, "none") }

func (f failing) reached(t *testing.T) bool {
	t.Helper()
	out, err := f.script("test -e " + guestPoints + ".hit && echo yes || echo no")
	ok(t, err)
	return out == "yes"
}

// life gives the volume to the sandbox, looks at it and takes it back. It repeats a call that
// fails, and calls failed after each failure.
func (f failing) life(ctx context.Context, p *pod, failed func()) error {
	c := f.s.Client
	const count = "grep -c ' /run/crust/volumes/' /proc/self/mountinfo || true"
	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error { _, err := c.RuntimePublishVolume(ctx, p.request()); return err },
		func(ctx context.Context) error {
			r, err := c.RuntimeGetVolumeStats(ctx,
				&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
			if err == nil && len(r.GetUsage()) == 0 {
				err = errors.New("no usage")
			}
			return err
		},
		func(context.Context) error {
			path, err := f.find(p.target)
			if err != nil {
				return err
			}
			out, err := f.script("cat " + path + "/word; echo; " + count)
			if err == nil && out != p.name+"\n1" {
				err = fmt.Errorf("the word, and how often the volume is mounted: %q", out)
			}
			return err
		},
		func(ctx context.Context) error {
			_, err := c.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: p.name, HostVolumeId: p.info.Source})
			return err
		},
	} {
		if err := repeated(ctx, p.name, call, failed); err != nil {
			return err
		}
	}
	if left, err := f.script("ls -A /run/crust/volumes; " + count); err != nil || left != "0" {
		return fmt.Errorf("left in the guest: %s, %w", left, err)
	}
	return nil
}

// D06: each step of a microVM's agent in turn fails, kills it, and hangs. The sandbox still gets
// its volume. During a hang a second call on the volume is answered, and another microVM is served.
func TestD06_GuestErrorKillOrHangAtEveryStep(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	dir := t.TempDir()
	ok(t, os.Mkdir(dir+"/tree", 0o755))
	run(t, "env", "CGO_ENABLED=0", "go", "build", "-tags", "failpoint", "-ldflags", "-s -w", "-o", dir+"/tree/init",
		"../../cmd/crust-guest")
	s.initrd = withTree(t, dir)
	give := func(name string) (*pod, failing) {
		v := s.Volume(name, "ext4")
		t.Cleanup(func() { s.Delete(v) })
		target := s.Node.Target("before-" + name)
		ok(t, s.Node.Client.Publish(ctxOf(t), v, target, false))
		ok(t, os.WriteFile(target+"/word", []byte(name), 0o600))
		ok(t, s.Node.Client.Unpublish(ctxOf(t), v.ID, target))
		p := s.pod(name, v)
		ok(t, s.nodePublish(p))
		t.Cleanup(func() { s.nodeUnpublish(p) })
		return p, failing{s.boot(p, "q35", "CRUST_FAILPOINT_FILE="+guestPoints)}
	}
	p, f := give("guest-a")
	q, other := give("guest-b")
	t.Cleanup(func() { s.deregister(p); s.deregister(q) })
	points := append(failpoints(t, "../../cmd/crust-guest"), "mount.detached", "attach.before")
	if len(points) < 6 {
		t.Fatalf("crust-guest has only %v", points)
	}
	for _, point := range points {
		for _, mode := range []string{"error", "kill"} {
			t.Run(mode+"/"+point, func(t *testing.T) {
				f.set(t, point, mode)
				ok(t, f.life(ctxOf(t), p, func() {
					if f.reached(t) {
						f.off(t)
					}
				}))
				if !f.reached(t) {
					t.Error("the step was not reached")
				}
				f.off(t)
			})
		}
		t.Run("hang/"+point, func(t *testing.T) {
			f.set(t, point, "hang")
			ended := make(chan error, 1)
			go func() { ended <- f.life(ctxOf(t), p, func() {}) }()
			for !f.reached(t) && len(ended) == 0 {
				time.Sleep(20 * time.Millisecond)
			}
			if !f.reached(t) {
				t.Error("the step was not reached")
			}
			if _, err := s.Client.RuntimePublishVolume(ctxOf(t), p.request()); status.Code(err) != codes.Aborted {
				t.Errorf("a second call on the volume: %v", err)
			}
			if err := other.life(ctxOf(t), q, func() {}); err != nil {
				t.Errorf("while it hangs, another microVM: %v", err)
			}
			f.off(t)
			ok(t, <-ended)
		})
	}
}
