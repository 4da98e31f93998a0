package skew

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

const blockSize = 4096

// pod has a volume published and writes to it all the time, whatever happens to csi-node.
type pod struct {
	t    *testing.T
	n    *testnode.Node
	name string
	v    csiclient.Volume
	file string // in the volume, or the device
	ro   bool   // it only reads others' data

	seed    uint64
	written atomic.Int64 // blocks
	size    int64        // of the volume
	ended   chan error   // an error ends the writing
	halt    func() error // stops it
}

func (p *pod) target() string { return p.n.Target(p.name) }

// block returns the content of a place of the file.
func (p *pod) block(i int64) []byte {
	b := make([]byte, blockSize)
	r := rand.NewChaCha8([32]byte{byte(p.seed), byte(p.seed >> 8), byte(i), byte(i >> 8), byte(i >> 16)})
	_, _ = r.Read(b) // it never fails
	return b
}

// begin publishes the volume and starts to write.
func (p *pod) begin() {
	p.t.Helper()
	ok(p.t, p.n.Client.Publish(ctxOf(p.t), p.v, p.target(), p.ro))
	p.file = filepath.Join(p.target(), "data")
	if p.v.Block {
		p.file = p.target()
	}
	if p.ro {
		return
	}
	flags := os.O_RDWR
	if !p.v.Block {
		flags |= os.O_CREATE
	}
	f, err := os.OpenFile(p.file, flags, 0o644)
	ok(p.t, err)
	stop, ended := make(chan struct{}), make(chan error, 1)
	p.halt = sync.OnceValue(func() error { close(stop); return <-ended })
	p.t.Cleanup(func() { _ = p.halt() }) // a failed test must release the volume
	p.ended = ended
	go func() { ended <- errors.Join(p.write(f, stop), f.Close()) }()
	p.goesOn()
}

// write writes until stop; the volume has room for an hour.
func (p *pod) write(f *os.File, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return f.Sync() // without Sync v0.1.0 loses unwritten data of a raw volume's device
		case <-time.After(10 * time.Millisecond):
		}
		i := p.written.Load()
		if _, err := f.WriteAt(p.block(i), i*blockSize); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		p.written.Add(1)
	}
}

// goesOn waits until something more was written.
func (p *pod) goesOn() {
	p.t.Helper()
	if p.ro {
		return
	}
	before := p.written.Load()
	eventually(p.t, time.Minute, p.name+" writes", func() bool {
		select {
		case err := <-p.ended:
			p.ended <- err // for halt
			p.t.Fatalf("%s cannot write any more: %v", p.name, err)
		default:
		}
		return p.written.Load() > before
	})
}

// check compares all written data with what is read, byte for byte.
func (p *pod) check() {
	p.t.Helper()
	p.goesOn()
	f, err := os.Open(p.file)
	ok(p.t, err)
	defer f.Close()
	b := make([]byte, blockSize)
	for i := range p.written.Load() {
		if _, err := io.ReadFull(f, b); err != nil {
			p.t.Fatalf("%s, block %d: %v", p.name, i, err)
		}
		if !bytes.Equal(b, p.block(i)) {
			p.t.Fatalf("%s: block %d of %d was changed: it begins with %x, not %x", p.name, i, p.written.Load(), b[:8], p.block(i)[:8])
		}
	}
}

// use does what the kubelet does while a pod runs: it repeats calls, and gets stats.
func (p *pod) use() {
	p.t.Helper()
	p.check()
	c := p.n.Client
	ok(p.t, c.Stage(ctxOf(p.t), p.v))
	ok(p.t, c.Publish(ctxOf(p.t), p.v, p.target(), p.ro))
	r, err := c.NodeGetVolumeStats(ctxOf(p.t), &csi.NodeGetVolumeStatsRequest{
		VolumeId: p.v.ID, VolumePath: p.target(), StagingTargetPath: c.StagingPath(p.v.ID),
	})
	ok(p.t, err)
	if len(r.GetUsage()) == 0 || r.GetUsage()[0].GetTotal() < p.size*8/10 || r.GetUsage()[0].GetTotal() > p.size {
		p.t.Errorf("%s of %d bytes has the stats %v", p.name, p.size, r)
	}
	h, err := c.NodeGetVolumeHealth(ctxOf(p.t), &csi.NodeGetVolumeHealthRequest{VolumeId: p.v.ID, VolumePublishPath: p.target()})
	ok(p.t, err)
	for _, s := range h.GetVolumeHealth().GetHealthStatuses() {
		if s.GetStatus() != csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE { // this is normal
			p.t.Errorf("%s is not well: %s, %s", p.name, s.GetReason(), s.GetMessage())
		}
	}
}

// grow enlarges the volume. Its content grows under the pod, but an ext4 grows at the next stage,
// because online that takes a capability that not every root has.
func (p *pod) grow() {
	p.t.Helper()
	p.size += 64 << 20
	at := p.target()
	if p.v.FSType == "ext4" {
		at = ""
	}
	got, err := p.n.Client.Expand(ctxOf(p.t), p.v.ID, p.size, at)
	ok(p.t, err)
	if got != p.size {
		p.t.Errorf("%s has %d bytes, asked for %d", p.name, got, p.size)
	}
}

// end takes the volume from the pod.
func (p *pod) end() {
	p.t.Helper()
	p.check()
	if !p.ro {
		ok(p.t, p.halt())
	}
	ok(p.t, p.n.Client.Unpublish(ctxOf(p.t), p.v.ID, p.target()))
	if _, err := os.Lstat(p.target()); !errors.Is(err, os.ErrNotExist) {
		p.t.Errorf("%s is still there: %v", p.target(), err)
	}
}

// again is the pod's next life, with the volume unstaged in between.
func (p *pod) again() {
	p.t.Helper()
	p.end()
	ok(p.t, p.n.Client.Unstage(ctxOf(p.t), p.v.ID))
	ok(p.t, p.n.Client.Stage(ctxOf(p.t), p.v))
	p.begin()
	p.check()
}

// remove ends it and deletes the volume.
func (p *pod) remove() {
	p.t.Helper()
	p.end()
	ok(p.t, p.n.Client.Unstage(ctxOf(p.t), p.v.ID))
	ok(p.t, p.n.Client.Delete(ctxOf(p.t), p.v.ID))
}
