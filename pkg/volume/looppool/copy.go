package looppool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// copyQuiesced copies an image while its volume is quiesced: it shares extents if the file
// system can (milliseconds), and copies bytes otherwise.
func (p *Pool) copyQuiesced(ctx context.Context, dst *os.File, s fillSpec, progress *volume.Progress) (err error) {
	src, err := os.Open(s.origin)
	if err != nil {
		return err
	}
	defer src.Close()
	if s.quiesce != nil {
		still, qerr := s.quiesce(ctx)
		if qerr != nil {
			return fmt.Errorf("the volume could not be made to stand still: %w", qerr)
		}
		defer func() {
			if rerr := still.Resume(); rerr != nil { // somebody may have ended the freeze early, so the copy is not valid
				err = errors.Join(err, fmt.Errorf("%w: %w", errNotResumed, rerr))
			}
		}()
		if err := failpoint.Err("copy.frozen"); err != nil {
			return err
		}
		return p.copyStill(ctx, dst, src, s, still, progress)
	}
	return p.copyStill(ctx, dst, src, s, volume.Stillness{}, progress)
}

func (p *Pool) copyStill(ctx context.Context, dst, src *os.File, s fillSpec, still volume.Stillness, progress *volume.Progress) error {
	if err := src.Sync(); err != nil {
		return err
	}
	if s.share {
		// The kernel blocks writes to the file meanwhile, so the copy is atomic.
		err := linux.Ficlone(dst, src)
		if err == nil {
			return failpoint.Err("copy.done")
		}
		if !errors.Is(err, linux.EOPNOTSUPP) && !errors.Is(err, linux.EINVAL) &&
			!errors.Is(err, linux.EXDEV) && !errors.Is(err, linux.ENOTTY) {
			return err
		}
	}
	if still.Writers != "" {
		why := fmt.Sprintf("the file system of pool %s (%s) shares no extents", p.name, p.dir)
		if !s.share {
			why = "a thick volume shares no extents"
		}
		return fault.New(fault.State,
			"volume %s may be written while it is copied: %s. %s, so the copy would hold parts of different times; "+
				"unpublish the writable volume first, or use a thin volume of a pool on a file system with reflink (xfs, btrfs)",
			s.of, still.Writers, why)
	}
	if err := unwritten(s.of, still, func() error { return p.copyData(ctx, dst, src, progress) }); err != nil {
		return err
	}
	return failpoint.Err("copy.done")
}

// unwritten runs f, and fails if the volume's device was written meanwhile, for example by a
// process that has had it open since before the driver started.
func unwritten(id string, still volume.Stillness, f func() error) error {
	if still.Written == nil {
		return f()
	}
	before, err := still.Written()
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	after, err := still.Written()
	if err == nil && (before != after || after.InFlight != 0) {
		err = fault.New(fault.State, "volume %s was written while it was copied, by a process that has its device open, "+
			"so there is no copy of one instant; end that process (see `fuser -v` of the device), "+
			"or use a thin volume of a pool on a file system with reflink (xfs, btrfs)", id)
	}
	return err
}

// copyData copies the data and leaves the holes. It counts the copied bytes and logs progress
// every ten seconds.
func (p *Pool) copyData(ctx context.Context, dst, src *os.File, progress *volume.Progress) error {
	total, err := dataBytes(src)
	if err != nil {
		return err
	}
	progress.Start(total)
	buf := make([]byte, 1<<20)
	said := time.Now()
	for off := int64(0); ; {
		start, end, done, err := linux.SeekData(src, off)
		if err != nil {
			return err
		}
		if done {
			return nil
		}
		for off = start; off < end; {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("the copy was stopped: %w", context.Cause(ctx))
			}
			n, err := src.ReadAt(buf[:min(int64(len(buf)), end-off)], off)
			if n == 0 && err != nil {
				return err
			}
			if _, err := dst.WriteAt(buf[:n], off); err != nil {
				return err
			}
			off += int64(n)
			progress.Add(int64(n))
			p.copied(int64(n))
			if time.Since(said) > 10*time.Second {
				said = time.Now()
				p.log.InfoContext(ctx, "copying a volume", "from", src.Name(), "to", dst.Name(), "progress", progress.String())
			}
		}
	}
}

func dataBytes(f *os.File) (total int64, err error) {
	for off := int64(0); ; {
		start, end, done, err := linux.SeekData(f, off)
		if err != nil || done {
			return total, err
		}
		total += end - start
		off = end
	}
}
