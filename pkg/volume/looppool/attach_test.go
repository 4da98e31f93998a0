package looppool

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// D06, A01: a pod can make a read-only loop device show another file, so that nothing of the volume is open any more. Its end releases that
// device too, also in a process that did not make it.
func TestD06_A01_ADeviceThatShowsAnotherFileIsReleased(t *testing.T) {
	for _, how := range []string{"by the process that made it", "by another"} {
		for what, end := range map[string]func(*Pool, string) error{
			"detach": func(p *Pool, id string) error { return p.Detach(t.Context(), id) },
			"delete": func(p *Pool, id string) error { return p.Delete(t.Context(), id) },
		} {
			t.Run(what+" "+how, func(t *testing.T) {
				p, v := withVolume(t)
				d := shownAnother(t, p, v)
				if how == "by another" {
					dir := p.dir
					p.Close()
					var err error
					if p, err = Open(Options{Name: "p", Dir: dir, NodesDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}); err != nil {
						t.Fatal(err)
					}
					defer p.Close()
					if err := p.Recover(func(volume.Source, string) error { return nil }); err != nil {
						t.Fatal(err)
					}
				}
				if what == "delete" { // its own device is gone
					a, ok, err := p.Attached(v.ID)
					if err != nil || !ok {
						t.Fatal(ok, err)
					}
					own, _, err := p.loop.Open(a.Device.Major, a.Device.Minor)
					if err == nil {
						err = p.raw.Detach(own)
					}
					if _, img, _, ierr := p.image(v.ID); err != nil || ierr != nil || !loopdev.Unbound(img) {
						t.Fatal("something still has the volume's file open", err, ierr)
					}
				}
				if err := end(p, v.ID); err != nil {
					t.Fatal(err)
				}
				if shows, err := loopdev.BackingFile(d.Major, d.Minor); err != nil || strings.HasSuffix(shows, "/another") {
					t.Errorf("%s still shows %q: %v", d.Path, shows, err)
				}
			})
		}
	}
}

// shownAnother attaches the volume, and makes a read-only device of it that shows another file, as a pod would.
func shownAnother(t *testing.T, p *Pool, v volume.Volume) mounter.Device {
	t.Helper()
	if err := p.Recover(func(volume.Source, string) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Attach(t.Context(), v.ID); err != nil {
		t.Fatal(err)
	}
	d, err := p.AttachReadOnly(t.Context(), v.ID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left, ok, err := p.loop.Open(d.Major, d.Minor); err == nil && ok {
			_ = p.loop.Detach(left)
		}
	})
	found, err := p.devices(v.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		if device(f).Same(d) {
			_, err = p.loop.Hold(f)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	another := filepath.Join(t.TempDir(), "another")
	if err := os.WriteFile(another, make([]byte, v.Size), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(another)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	node, err := os.Open(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	if err := linux.LoopChangeFD(node, file); err != nil {
		t.Fatal(err)
	}
	return d
}
