package crust

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Root of a microVM takes the agent's place. The server answers every call in time and in plain,
// bounded text, keeps its memory bounded, and serves another microVM as before. The volume can be
// taken back.
func TestAGuestWhoseRootAttacks(t *testing.T) {
	t.Parallel()
	s := newServer(t, "qemu", "")
	s.acquaint()
	dir := t.TempDir()
	ok(t, os.Mkdir(dir+"/tree", 0o755))
	run(t, "cp", testnode.Program{Name: "hostile", Package: "./hostile"}.Build(t), dir+"/tree/hostile")
	honest, evil := s.Volume("honest", "ext4"), s.Volume("evil", "ext4")
	p, q := s.pod("honest", honest), s.pod("evil", evil)
	ok(t, s.nodePublish(p))
	ok(t, s.nodePublish(q))
	m := s.boot(p, "q35", "")
	s.initrd = withTree(t, dir)
	bad := s.boot(q, "q35", "")
	ok(t, s.runtimePublish(p))
	ok(t, s.runtimePublish(q))
	sh(t, m, "echo kept > %s/f", m.Path(p.target))
	s.Stop()
	s.Args = append(s.Args, "--timeout", oneCall(t).String()) // boots are over
	s.Start()
	ok(t, s.runtimePublish(p))
	ok(t, s.runtimePublish(q))
	before := s.memory()
	for _, mode := range []string{"lies", "huge", "silent", "noise"} {
		bad.becomes(mode)
		var attacked atomic.Bool // somebody got a hostile answer, or none
		var calls sync.WaitGroup
		for name, call := range map[string]func(context.Context) (string, error){
			"stats": func(ctx context.Context) (string, error) {
				r, err := s.Client.RuntimeGetVolumeStats(ctx,
					&crustv1alpha1.RuntimeGetVolumeStatsRequest{SandboxId: q.name, HostVolumeId: q.info.Source})
				for _, u := range r.GetUsage() {
					if u.GetTotal() < 0 || u.GetAvailable() < 0 || u.GetUsed() < 0 {
						t.Errorf("%s: usage %v", mode, u)
					}
				}
				return "", err
			},
			"resolve": func(ctx context.Context) (string, error) {
				r, err := s.Client.ResolveMount(ctx,
					&crustv1alpha1.ResolveMountRequest{SandboxId: q.name, Source: q.target + "/lost+found"})
				return r.GetPath(), err
			},
			"publish": func(ctx context.Context) (string, error) {
				_, err := s.Client.RuntimePublishVolume(ctx, q.request())
				return "", err
			},
			"expand": func(ctx context.Context) (string, error) {
				_, err := s.Client.RuntimeExpandVolume(ctx,
					&crustv1alpha1.RuntimeExpandVolumeRequest{SandboxId: q.name, HostVolumeId: q.info.Source, RequiredBytes: 1 << 20})
				return "", err
			},
			"exec": func(ctx context.Context) (string, error) {
				r, err := s.Client.ExecInSandbox(ctx, &crustv1alpha1.ExecInSandboxRequest{SandboxId: q.name, Argv: []string{"/bin/true"}})
				if err != nil || len(r.GetOutput()) > 0 {
					attacked.Store(true)
				}
				return "", err // its output is what was asked for
			},
			"list": func(ctx context.Context) (string, error) {
				r, err := s.Client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
				return r.String(), err
			},
		} {
			calls.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), testcrust.Longest())
				defer cancel()
				text, err := call(ctx)
				if ctx.Err() != nil {
					t.Errorf("%s: %s was not answered in time", mode, name)
				}
				if err != nil {
					text += status.Convert(err).Message()
					if status.Code(err) == codes.Unknown {
						t.Errorf("%s: %s: %v", mode, name, err)
					}
				}
				inPlainWords(t, mode+": "+name, text)
			})
		}
		calls.Wait()
		if !attacked.Load() {
			t.Errorf("%s: a program ran in the guest as if its agent were honest", mode)
		}
		// The server remembers what it answers to a mount request.
		ctx, cancel := context.WithTimeout(context.Background(), testcrust.Longest())
		_, err := s.Client.UnpublishVolume(ctx, &crustv1alpha1.UnpublishVolumeRequest{SandboxId: q.name, HostVolumeId: q.info.Source})
		inPlainWords(t, mode+": unpublish", status.Convert(err).Message())
		_, err = s.Client.RuntimePublishVolume(ctx, q.request())
		inPlainWords(t, mode+": publish anew", status.Convert(err).Message())
		list, err := s.Client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
		cancel()
		ok(t, err)
		for _, sb := range list.GetSandboxes() {
			for _, v := range sb.GetVolumes() {
				inPlainWords(t, mode+": list", v.GetSandboxPath())
			}
		}
		if out := sh(t, m, "cat %s/f", m.Path(p.target)); out != "kept" {
			t.Errorf("%s: the other microVM has %q", mode, out)
		}
		ok(t, s.runtimePublish(p))
	}
	if after := s.memory(); after > before+64<<20 {
		t.Errorf("crustd had %d MiB, and has %d", before>>20, after>>20)
	}
	bad.Kill()
	for deadline := time.Now().Add(testcrust.Longest()); ; time.Sleep(20 * time.Millisecond) {
		list, err := s.Client.ListSandboxes(ctxOf(t), &crustv1alpha1.ListSandboxesRequest{})
		ok(t, err)
		if len(list.GetSandboxes()) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the microVM has ended, and is still listed")
		}
	}
	s.nodeUnpublish(q)
	s.Delete(evil)
	s.deregister(p)
	s.nodeUnpublish(p)
	s.Delete(honest)
}

// becomes makes the guest hostile. Whoever has the guest's port is killed, or changes its mode: the
// guest's console tells when that is done.
func (m *machine) becomes(mode string) {
	m.t.Helper()
	var asked time.Time
	eventually(m.t, testcrust.Longest(), "the guest is hostile: "+mode, func() bool {
		if time.Since(asked) > oneCall(m.t) { // the one who was asked may have died of it
			_, _ = m.Exec("/hostile " + mode + " >/dev/console 2>&1 &") // its answer may be hostile
			asked = time.Now()
		}
		console, err := os.ReadFile(m.vm.Console)
		ok(m.t, err)
		return strings.Contains(string(console), "it has the port; mode "+mode)
	})
}

// inPlainWords fails if a text is long or contains anything that a terminal would interpret.
func inPlainWords(t *testing.T, what, text string) {
	t.Helper()
	if strings.ContainsAny(text, "\x00\x1b\u202e") || !utf8.ValidString(text) || len(text) > 64<<10 {
		t.Errorf("%s tells %d bytes: %.200q", what, len(text), text)
	}
}

// memory returns the server's resident memory in bytes.
func (s *server) memory() int64 {
	s.T.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.Cmd.Process.Pid))
	ok(s.T, err)
	kib, err := strconv.ParseInt(regexp.MustCompile(`VmRSS:\s+(\d+) kB`).FindStringSubmatch(string(b))[1], 10, 64)
	ok(s.T, err)
	return kib << 10
}
