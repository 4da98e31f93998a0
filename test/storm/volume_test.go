package storm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
)

// vol is what the callers know of one volume. Callers that change it hold mu, so each answer
// follows from the state. Callers that only read do not.
type vol struct {
	s       *storm
	name    string
	size    int64
	mu      sync.Mutex
	use     csiclient.Volume
	id      atomic.Pointer[string] // use.ID for readers; it follows from the name
	made    bool
	staged  bool
	targets map[string]bool // read-only?
	word    string          // what was written
	snap    string          // id of its snapshot
}

const mib = 1 << 20

func newVol(s *storm, i int) *vol {
	v := &vol{s: s, name: fmt.Sprintf("v%d", i), targets: map[string]bool{}}
	switch {
	case i%10 == 0:
		v.use, v.size = csiclient.Volume{FSType: "xfs"}, 300*mib
	case i%10 == 1:
		v.use, v.size = csiclient.Volume{FSType: "btrfs"}, 128*mib
	case i%5 == 2:
		v.use, v.size = csiclient.Volume{Block: true}, 8*mib
	default:
		v.use, v.size = csiclient.Volume{FSType: "ext4"}, 16*mib
	}
	return v
}

func (v *vol) target() string {
	return v.s.node.Target(v.name + "-" + []string{"x", "y"}[rand.IntN(2)])
}

func (v *vol) create(size int64, want ...codes.Code) {
	v.s.call("create "+v.name, func(ctx context.Context) error {
		made, err := v.s.client.Create(ctx, v.name, size, v.use, nil, nil)
		if err == nil {
			v.use.ID = made.GetVolumeId()
			id := v.use.ID
			v.id.Store(&id)
		}
		return err
	}, want...)
}

// step does something legal, or now and then something illegal.
func (v *vol) step() {
	legal, illegal := v.choices()
	list := legal
	if len(illegal) > 0 && rand.IntN(4) == 0 {
		list = illegal
	}
	list[rand.IntN(len(list))]()
}

func (v *vol) choices() (legal, illegal []func()) {
	switch {
	case !v.made:
		legal = append(legal, func() { v.create(v.size, codes.OK); v.made = true })
		if v.use.ID != "" {
			illegal = append(illegal, func() { v.stage(codes.NotFound) })
		}
	case !v.staged:
		legal = append(legal, func() { v.stage(codes.OK); v.staged = true }, func() { v.stage(codes.OK); v.staged = true },
			v.remove, v.snapshot)
		illegal = append(illegal, func() { v.publish(v.target(), false, codes.FailedPrecondition) },
			func() { v.create(v.size+64*mib, codes.AlreadyExists) })
	default:
		target, readOnly := v.target(), rand.IntN(3) == 0
		was, there := v.targets[target]
		illegal = append(illegal, func() { v.delete(codes.FailedPrecondition) })
		switch {
		case !there:
			legal = append(legal, func() { v.publish(target, readOnly, codes.OK) })
		case was == readOnly:
			legal = append(legal, func() { v.publish(target, readOnly, codes.OK) }, func() { v.unpublish(target) },
				func() { v.unpublish(target) })
		default:
			illegal = append(illegal, func() { v.publish(target, readOnly, codes.AlreadyExists) })
			legal = append(legal, func() { v.unpublish(target) })
		}
		if len(v.targets) == 0 {
			legal = append(legal, func() { v.unstage(codes.OK); v.staged = false })
		} else {
			illegal = append(illegal, func() { v.unstage(codes.FailedPrecondition) })
		}
		if !v.use.Block {
			legal = append(legal, v.snapshot)
		}
	}
	return legal, illegal
}

func (v *vol) stage(want codes.Code) {
	v.s.call("stage "+v.name, func(ctx context.Context) error { return v.s.client.Stage(ctx, v.use) }, want)
}

func (v *vol) unstage(want codes.Code) {
	v.s.call("unstage "+v.name, func(ctx context.Context) error {
		_, err := v.s.client.NodeUnstageVolume(ctx,
			&csi.NodeUnstageVolumeRequest{VolumeId: v.use.ID, StagingTargetPath: v.s.client.StagingPath(v.use.ID)})
		return err
	}, want)
}

func (v *vol) delete(want codes.Code) {
	v.s.call("delete "+v.name, func(ctx context.Context) error { return v.s.client.Delete(ctx, v.use.ID) }, want)
}

func (v *vol) remove() {
	v.delete(codes.OK)
	v.made, v.word = false, ""
}

func (v *vol) publish(target string, readOnly bool, want codes.Code) {
	stopped := false
	code := v.s.call("publish "+v.name, func(ctx context.Context) error {
		err := v.s.client.Publish(ctx, v.use, target, readOnly)
		// SIGKILL during FITHAW of a btrfs interrupts the kernel's reading of its superblock: it stops then, in all kernels up to 6.18.
		stopped = v.use.FSType == "btrfs" && status.Code(err) == codes.FailedPrecondition &&
			strings.Contains(err.Error(), "stopped taking writes because of errors")
		if stopped {
			return status.Error(want, "")
		}
		return err
	}, want)
	if stopped {
		v.takeDown()
		return
	}
	if code != codes.OK || want != codes.OK {
		return
	}
	v.targets[target] = readOnly
	if err := v.look(target, readOnly); err != nil {
		v.s.judge("content "+v.name, codes.DataLoss, err, nil)
	}
}

// takeDown does what the driver says of a file system that has stopped. What was written last may be lost.
func (v *vol) takeDown() {
	for target := range v.targets {
		v.unpublish(target)
	}
	v.unstage(codes.OK)
	v.staged, v.word = false, ""
}

// look expects the last word, and writes a new one if it may.
func (v *vol) look(target string, readOnly bool) error {
	path := filepath.Join(target, "word")
	if v.use.Block {
		path = target
	}
	if v.word != "" {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		have := make([]byte, len(v.word))
		_, err = f.ReadAt(have, 0)
		f.Close()
		// A read-only device of a raw volume has its own page cache.
		if err != nil || string(have) != v.word && !v.use.Block {
			return fmt.Errorf("%s holds %q, want %q (%v)", path, have, v.word, err)
		}
	}
	if readOnly {
		return nil
	}
	word := fmt.Sprintf("%-12s %016x\n", v.name, rand.Uint64())
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(word), 0); err != nil {
		return err
	}
	v.word = word
	return nil
}

func (v *vol) unpublish(target string) {
	v.s.call("unpublish "+v.name, func(ctx context.Context) error { return v.s.client.Unpublish(ctx, v.use.ID, target) }, codes.OK)
	delete(v.targets, target)
}

// snapshot makes the volume's snapshot, or deletes it.
func (v *vol) snapshot() {
	if v.snap != "" {
		v.s.call("unsnap "+v.name, func(ctx context.Context) error {
			_, err := v.s.client.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: v.snap})
			return err
		}, codes.OK)
		v.snap = ""
		return
	}
	v.s.call("snapshot "+v.name, func(ctx context.Context) error {
		made, err := v.s.client.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: v.name, SourceVolumeId: v.use.ID})
		if err == nil {
			v.snap = made.GetSnapshot().GetSnapshotId()
		}
		return err
	}, codes.OK)
}

// read looks at the volume while others change it: it may be there or not, and no intermediate
// state shows.
func (v *vol) read() {
	known := v.id.Load()
	if known == nil {
		return
	}
	id := *known
	c, target := v.s.client, v.target()
	for what, f := range map[string]func(context.Context) error{
		"stats": func(ctx context.Context) error {
			_, err := c.NodeGetVolumeStats(ctx,
				&csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target, StagingTargetPath: c.StagingPath(id)})
			return err
		},
		"health": func(ctx context.Context) error {
			_, err := c.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: target})
			return err
		},
		"get": func(ctx context.Context) error {
			_, err := c.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
			return err
		},
	} {
		v.s.call(what+" "+v.name, f, codes.OK, codes.NotFound, codes.Aborted) // Aborted: it is being deleted
	}
}

// away removes the volume, whatever its state.
func (v *vol) away() {
	if v.snap != "" {
		v.snapshot()
	}
	for target := range v.targets {
		v.unpublish(target)
	}
	if v.staged {
		v.unstage(codes.OK)
	}
	if v.made {
		v.remove()
	}
}
