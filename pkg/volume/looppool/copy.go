package looppool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/crust-csi/crust-csi/internal/failpoint"
	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// copyQuiesced copies an image while its volume stands still: by sharing its
// extents where the file system can (milliseconds), else byte by byte.
func (p *Pool) copyQuiesced(ctx context.Context, dst *os.File, s fillSpec, progress *volume.Progress) (err error) {
	src, err := os.Open(s.origin)
	if err != nil {
		return err
	}
	defer src.Close()
	if s.quiesce != nil {
		resume, err := s.quiesce(ctx)
		if err != nil {
			return fmt.Errorf("the volume could not be made to stand still: %w", err)
		}
		defer func() {
			if rerr := resume(); rerr != nil {
				err = errors.Join(err, fmt.Errorf("the volume could not be resumed: %w", rerr))
			}
		}()
		failpoint.Hit("copy.frozen")
	}
	if err := src.Sync(); err != nil {
		return err
	}
	if s.share {
		err := linux.Ficlone(dst, src)
		if err == nil {
			failpoint.Hit("copy.done")
			return nil
		}
		if !errors.Is(err, linux.EOPNOTSUPP) && !errors.Is(err, linux.EINVAL) && !errors.Is(err, linux.EXDEV) && !errors.Is(err, linux.ENOTTY) {
			return err
		}
	}
	err = p.copyData(ctx, dst, src, progress)
	failpoint.Hit("copy.done")
	return err
}

// copyData copies the runs of data and leaves the holes. What was copied is
// counted, and logged every ten seconds.
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
