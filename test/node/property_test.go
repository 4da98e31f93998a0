package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// model is what a test client knows of the volumes.
type model struct {
	n    *testnode.Node
	run  int
	vols map[string]*modelVolume
}

type modelVolume struct {
	csiclient.Volume
	staged  bool
	targets map[string]bool // read-only?
	content string
}

func (m *model) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	time.AfterFunc(time.Minute, cancel)
	return ctx
}

func (m *model) want(t *rapid.T, err error, code codes.Code, what string) {
	if status.Code(err) != code {
		t.Fatalf("%s: want %s, got %v", what, code, err)
	}
}

func (m *model) pick(t *rapid.T) *modelVolume {
	name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "volume")
	return m.vols[name]
}

func (m *model) create(t *rapid.T) {
	name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
	made, err := m.n.Client.Create(m.ctx(), fmt.Sprintf("%s-%d", name, m.run), 16<<20, csiclient.Volume{FSType: "ext4"}, nil, nil)
	m.want(t, err, codes.OK, "create")
	if m.vols[name] == nil {
		m.vols[name] = &modelVolume{Volume: csiclient.Volume{ID: made.GetVolumeId(), FSType: "ext4"}, targets: map[string]bool{}}
	} else if m.vols[name].ID != made.GetVolumeId() {
		t.Fatalf("a repeated create made another volume")
	}
}

func (m *model) remove(t *rapid.T) {
	v := m.pick(t)
	if v == nil {
		return
	}
	err := m.n.Client.Delete(m.ctx(), v.ID)
	if v.staged || len(v.targets) > 0 {
		m.want(t, err, codes.FailedPrecondition, "delete of a volume in use")
		return
	}
	m.want(t, err, codes.OK, "delete")
	for name, o := range m.vols {
		if o == v {
			delete(m.vols, name)
		}
	}
}

func (m *model) stage(t *rapid.T) {
	if v := m.pick(t); v != nil {
		m.want(t, m.n.Client.Stage(m.ctx(), v.Volume), codes.OK, "stage")
		v.staged = true
	}
}

func (m *model) unstage(t *rapid.T) {
	v := m.pick(t)
	if v == nil {
		return
	}
	_, err := m.n.Client.NodeUnstageVolume(m.ctx(),
		&csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: m.n.Client.StagingPath(v.ID)})
	if len(v.targets) > 0 {
		m.want(t, err, codes.FailedPrecondition, "unstage of a published volume")
		return
	}
	m.want(t, err, codes.OK, "unstage")
	v.staged = false
}

func (m *model) target(t *rapid.T, v *modelVolume) string {
	return m.n.Target(fmt.Sprintf("%d-%s-%s", m.run, v.ID, rapid.SampledFrom([]string{"x", "y"}).Draw(t, "target")))
}

func (m *model) publish(t *rapid.T) {
	v := m.pick(t)
	if v == nil {
		return
	}
	target, ro := m.target(t, v), rapid.Bool().Draw(t, "read-only")
	err := m.n.Client.Publish(m.ctx(), v.Volume, target, ro)
	was, published := v.targets[target]
	switch {
	case !v.staged:
		m.want(t, err, codes.FailedPrecondition, "publish before stage")
	case published && was != ro:
		m.want(t, err, codes.AlreadyExists, "publish in another way")
	default:
		m.want(t, err, codes.OK, "publish")
		v.targets[target] = ro
	}
}

func (m *model) unpublish(t *rapid.T) {
	v := m.pick(t)
	if v == nil {
		return
	}
	target := m.target(t, v)
	m.want(t, m.n.Client.Unpublish(m.ctx(), v.ID, target), codes.OK, "unpublish")
	delete(v.targets, target)
}

func (m *model) write(t *rapid.T) {
	v := m.pick(t)
	if v == nil {
		return
	}
	for target, ro := range v.targets {
		text := rapid.StringN(1, 20, 100).Draw(t, "text")
		err := os.WriteFile(filepath.Join(target, "f"), []byte(text), 0o600)
		if (err != nil) != ro {
			t.Fatalf("write at %s, read-only %v: %v", target, ro, err)
		}
		if err == nil {
			v.content = text
		}
		return
	}
}

// check compares the kernel's state with the model.
func (m *model) check(t *rapid.T) {
	for _, v := range m.vols {
		for target := range v.targets {
			b, err := os.ReadFile(filepath.Join(target, "f"))
			if v.content != "" && (err != nil || string(b) != v.content) {
				t.Fatalf("%s holds %q, want %q: %v", target, b, v.content, err)
			}
			if _, err := m.n.Client.NodeGetVolumeStats(m.ctx(),
				&csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: target}); err != nil {
				t.Fatalf("stats at %s: %v", target, err)
			}
		}
	}
}

// TestRandomCallSequences makes random calls, and kills the driver, against a model of the expected
// results.
func TestRandomCallSequences(t *testing.T) {
	t.Parallel()
	n := testnode.New(t, "")
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		m := &model{n: n, run: run, vols: map[string]*modelVolume{}}
		rt.Repeat(map[string]func(*rapid.T){
			"create": m.create, "delete": m.remove, "stage": m.stage, "unstage": m.unstage, "publish": m.publish,
			"publish more": m.publish, "unpublish": m.unpublish, "write": m.write, "": m.check,
			"kill": func(rt *rapid.T) {
				if rapid.IntRange(0, 9).Draw(rt, "dice") == 0 {
					n.Restart()
				}
			},
		})
		for _, v := range m.vols {
			for target := range v.targets {
				m.want(rt, n.Client.Unpublish(m.ctx(), v.ID, target), codes.OK, "unpublish at the end")
			}
			m.want(rt, n.Client.Unstage(m.ctx(), v.ID), codes.OK, "unstage at the end")
			m.want(rt, n.Client.Delete(m.ctx(), v.ID), codes.OK, "delete at the end")
		}
		checkNothingLeft(t, n)
	})
}
