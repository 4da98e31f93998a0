package skew

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// programs are the versions of one node's programs.
type programs struct{ csiNode, crustd, agent string }

func (p programs) String() string {
	return fmt.Sprintf("csi-node of %s, crustd of %s, crust-agent of %s", p.csiNode, p.crustd, p.agent)
}

// walk returns every combination, each one program away from the one before. It begins in the order
// of a rolling update, continues through the rest, and ends where it began.
func walk(release string) []programs {
	return []programs{
		{release, release, release},
		{today, release, release},
		{today, today, release},
		{today, today, today},
		{today, release, today},
		{release, release, today},
		{release, today, today},
		{release, today, release},
		{release, release, release},
	}
}

// tenant is a volume and its pods, one after another, whose sandboxes mount it.
type tenant struct {
	*testcrust.Tenant
	t     testing.TB
	a     *testcrust.Agent
	name  string
	v     csiclient.Volume
	size  int64
	due   bool     // it grows before the next pod
	lines []string // of the file that they write
}

func newTenant(t testing.TB, a *testcrust.Agent, name string) *tenant {
	t.Helper()
	return &tenant{t: t, a: a, name: name, v: a.S.Volume(name, "xfs"), size: testcrust.Size}
}

// call makes a call until it is answered, as the kubelet and the container runtime do: after a
// program was replaced, its clients reconnect.
func (p *tenant) call(what string, f func(context.Context) error) {
	p.t.Helper()
	ctx := ctxOf(p.t)
	var last error
	defer func() {
		if last != nil {
			p.t.Logf("%s: %s: %v", p.name, what, last)
		}
	}()
	eventually(p.t, testcrust.Longest(), p.name+": "+what, func() bool {
		last = f(ctx)
		switch code := status.Code(last); {
		case code == codes.FailedPrecondition && what == "unpublish": // the sandbox's server is still letting go
		case slices.Contains(final, code):
			p.t.Fatalf("%s: %s: %v", p.name, what, last)
		}
		return last == nil
	})
}

// final are codes that a repeated call does not change.
var final = []codes.Code{codes.FailedPrecondition, codes.InvalidArgument, codes.AlreadyExists, codes.NotFound, codes.Internal}

// tell announces something to the agent once, whatever it answers: the container runtime waits 2 s,
// and slower work continues.
func (p *tenant) tell(what string, f func(context.Context) error) {
	p.t.Helper()
	eventually(p.t, testcrust.Longest(), "an agent is connected to NRI", func() bool { return p.A.NRI.Plugin() != nil })
	if err := f(ctxOf(p.t)); err != nil {
		p.t.Logf("%s: %s: %v", p.name, what, err)
	}
}

// begin starts the next pod.
func (p *tenant) begin() {
	p.t.Helper()
	p.Tenant = p.a.Tenant(p.t, p.name, p.v)
	if p.due {
		ok(p.t, p.a.S.Node.Client.Unstage(ctxOf(p.t), p.v.ID))
		ok(p.t, p.a.S.Node.Client.Stage(ctxOf(p.t), p.v))
	}
	p.call("publish", p.Publish)
	p.tell("the sandbox starts", p.Run)
	p.call("a container is made", p.Create)
	if p.due {
		p.isGrown()
		p.due = false
	}
	p.use()
}

// use writes a line in the sandbox, reads all of them, and makes the kubelet's calls.
func (p *tenant) use() {
	p.t.Helper()
	p.lines = append(p.lines, fmt.Sprintf("line %d of %s", len(p.lines), p.name))
	out, err := p.Holder.Exec(fmt.Sprintf("echo %s >>%s/f && sync && cat %s/f", p.lines[len(p.lines)-1], p.Target, p.Target))
	ok(p.t, err)
	if got := strings.Split(strings.TrimSpace(out), "\n"); !slices.Equal(got, p.lines) {
		p.t.Errorf("%s reads %q, and wrote %q", p.name, got, p.lines)
	}
	p.call("publish once more", p.Publish)
	p.call("stats", p.Stats)
	if entries, err := os.ReadDir(p.Target); err == nil && len(entries) > 0 {
		p.t.Errorf("the node shows the volume of %s: %v", p.name, entries)
	}
}

// grow enlarges the volume, and its file system in the sandbox. If a runtime cannot do that, it
// says so, and the file system grows before the next pod.
func (p *tenant) grow() {
	p.t.Helper()
	p.size += 32 << 20
	can, err := p.a.S.Client.RuntimeGetCapabilities(ctxOf(p.t), &crustv1alpha1.RuntimeGetCapabilitiesRequest{})
	ok(p.t, err)
	if slices.ContainsFunc(can.GetCapabilities(), func(c *crustv1alpha1.RuntimeCapability) bool {
		return c.GetRpc().GetType() == crustv1alpha1.RuntimeCapability_RPC_VOLUME_RESIZE
	}) {
		p.call("growth", func(ctx context.Context) error {
			_, err := p.a.Kubelet.Expand(ctx, p.v.ID, p.size, p.Target)
			return err
		})
		p.isGrown()
		return
	}
	p.call("growth that waits", func(ctx context.Context) error {
		_, err := p.a.Kubelet.Expand(ctx, p.v.ID, p.size, p.Target)
		if status.Code(err) != codes.FailedPrecondition {
			return err
		}
		refused(p.t, err, codes.FailedPrecondition, p.v.ID, "end the pod")
		return nil
	})
	p.due = true
}

// isGrown checks the size of the file system in the sandbox.
func (p *tenant) isGrown() {
	p.t.Helper()
	out, err := p.Holder.Exec("stat -f -c '%b %S' " + p.Target)
	ok(p.t, err)
	var blocks, each int64 // the log of an xfs takes 64 MiB
	if _, err := fmt.Sscan(out, &blocks, &each); err != nil || blocks*each < p.size-(80<<20) {
		p.t.Errorf("%s was grown to %d bytes and has %q blocks: %v", p.name, p.size, out, err)
	}
}

func (p *tenant) end() {
	p.t.Helper()
	p.use()
	p.tell("the sandbox ends", p.Stop)
	p.call("unpublish", p.Unpublish)
	if _, err := os.Lstat(p.Target); !os.IsNotExist(err) {
		p.t.Errorf("%s is still there: %v", p.Target, err)
	}
}

// TestEachPairOfProgramsOnANode replaces one program after another. One pod stays all the time, one
// is there while a program is replaced, and one has its whole life in each combination.
func TestEachPairOfProgramsOnANode(t *testing.T) {
	forEachRelease(t, func(t *testing.T, release string) {
		n := testnode.NewStopped(t, "")
		n.Bin = program(t, release, "csi-node")
		n.Begin()
		s := testcrust.NewServer(t, n, "namespace", program(t, release, "crustd"))
		a := testcrust.NewAgent(t, s, program(t, release, "crust-agent"))
		stays, meanwhile, next := newTenant(t, a, "stays"), newTenant(t, a, "meanwhile"), newTenant(t, a, "next")
		stays.begin()
		meanwhile.begin()
		was := walk(release)[0]
		for _, now := range walk(release) {
			switch {
			case now.csiNode != was.csiNode:
				becomes(t, n, now.csiNode)
			case now.crustd != was.crustd:
				s.Become(program(t, now.crustd, "crustd"))
			case now.agent != was.agent:
				a.Become(program(t, now.agent, "crust-agent"))
			}
			was = now
			t.Log(now)
			stays.use()
			stays.grow()
			meanwhile.end()
			next.begin()
			next.grow()
			next.end()
			meanwhile.begin()
		}
		meanwhile.end()
		stays.end()
		for _, p := range []*tenant{stays, meanwhile, next} {
			s.Delete(p.v)
		}
	})
}
