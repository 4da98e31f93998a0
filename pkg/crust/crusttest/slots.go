package crusttest

import (
	"testing"

	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// slots: what a slot shows follows the calls. A container is not started; see Kit.Write.
func (b *backendSuite) slots(t *testing.T) {
	prepare := func(source string) (string, error) {
		r, err := b.server.ResolveMount(b.ctx(), &crustv1alpha1.ResolveMountRequest{SandboxId: "one", Source: source})
		return r.GetPath(), err
	}
	path, err := prepare(crust.SlotsDir + "/a")
	if b.NoSlots {
		wants(t, "a slot of a sandbox without slots", err, fault.State)
		return
	}
	fatal(t, err)
	for _, name := range []string{"A", "a/b", "-a", "a.b"} {
		_, err := prepare(crust.SlotsDir + "/" + name)
		wants(t, "the slot "+name, err, fault.Invalid)
	}
	read := func() (string, error) { return b.Read(b.server, b.in(t, "one"), path+"/"+crust.SlotVolume+"/f") }
	write := func(name string) error {
		return b.Write(b.server, b.in(t, "one"), path+"/"+crust.SlotVolume+"/"+name, "written")
	}
	isEmpty := func(when string) {
		t.Helper()
		if text, err := read(); err == nil {
			t.Errorf("%s: the slot shows %q", when, text)
		}
		if write("g") == nil {
			t.Errorf("%s: the slot can be written to", when)
		}
	}
	shows := func(when, text string) {
		t.Helper()
		if got, err := read(); err != nil || got != text {
			t.Errorf("%s: the slot shows %q, %v; want %q", when, got, err, text)
		}
	}
	isEmpty("at first")
	d, _ := b.formatted(t)
	v := b.volume(d, "late")
	bind := func(slot string, readOnly bool) error {
		return b.server.Bind(b.ctx(), "one", slot, d.Path, "", readOnly)
	}
	wants(t, "a volume that is not published", bind("a", false), fault.NotFound)
	b.published(t, "one", v)
	b.put(t, "one", v.Target+"/f", "text")
	wants(t, "a slot that nobody has", bind("b", false), fault.State)
	isEmpty("published")
	for range 2 {
		fatal(t, bind("a", false))
	}
	shows("bound", "text")
	fatal(t, write("g"))
	wants(t, "a slot with other access", bind("a", true), fault.Exists)
	if again, err := prepare(crust.SlotsDir + "/a"); err != nil || again != path {
		t.Errorf("the slot is at %s, %v; it was at %s", again, err, path)
	}
	b.stop()
	b.start()
	shows("after a restart", "text")
	for range 2 {
		fatal(t, b.server.Unbind(b.ctx(), "one", "a"))
	}
	isEmpty("unbound")
	fatal(t, b.server.Unbind(b.ctx(), "one", "b"))
	fatal(t, bind("a", true))
	shows("read-only", "text")
	if write("h") == nil {
		t.Error("a read-only slot can be written to")
	}
	b.put(t, "one", v.Target+"/h", "the volume itself is not read-only")
	fatal(t, b.server.Unpublish(b.ctx(), "one", d.Path))
	isEmpty("unpublished")
	free(t, d)
}
