package fsprogs

import (
	"context"
	"errors"
	"fmt"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// ProbeIdmap tests whether this kernel supports idmapped mounts of a file system (pods with
// hostUsers: false and fsGroupStrategy idmap need them). It makes such a mount of a new file
// system in an unnamed file in dir. If /dev lacks nodes of loop devices, it makes them in
// nodesDir.
func (p *Programs) ProbeIdmap(ctx context.Context, name, dir, nodesDir string) mounter.Feature {
	f := mounter.Feature{
		Name: "idmapped mounts of " + name, Since: fstype.Of(name).IdmapSince,
		Cost: "no pod with hostUsers: false can use such a volume, and no fsGroupStrategy idmap",
	}
	if known := mounter.ProbeFilesystem(name); known.Answer == mounter.No {
		f.Answer, f.Why = mounter.No, "this kernel has no "+name+": "+known.Why
		return f
	}
	f.Answer, f.Why = idmapAnswer(p.tryIdmap(ctx, name, dir, nodesDir))
	return f
}

// idmapAnswer interprets the error of tryIdmap.
func idmapAnswer(err error) (answer mounter.Answer, why string) {
	switch {
	case err == nil:
		return mounter.Yes, ""
	case errors.Is(err, mounter.ErrNoIdmap), errors.Is(err, mounter.ErrNoMountSetattr):
		return mounter.No, err.Error()
	}
	return mounter.CannotTell, err.Error()
}

func (p *Programs) tryIdmap(ctx context.Context, name, dir, nodesDir string) error {
	file, err := linux.TempFile(dir, fstype.LargestMinimum()) // almost nothing is written
	if err != nil {
		return err
	}
	defer file.Close()
	loop, err := loopdev.Nodes{Dir: nodesDir}.Temporary(file)
	if err != nil {
		return err
	}
	defer loop.Close()
	mkfs := fstype.Of(name).Make
	if out, code, err := p.runMortal(ctx, mkfs, loop.Name()); err != nil {
		return fmt.Errorf("%s: %w: %s", mkfs[0], err, out)
	} else if code != 0 {
		return fmt.Errorf("%s: exit status %d: %s", mkfs[0], code, out)
	}
	dev, err := mounter.FindDevice(loop.Name())
	if err != nil {
		return err
	}
	m, err := mounter.Open(mounter.Filesystem{Device: dev, Type: name})
	if err != nil {
		return err
	}
	defer m.Close()
	idmap := mounter.ShowGroup(1, 2)
	return m.Change(mounter.View{IDMap: &idmap})
}
