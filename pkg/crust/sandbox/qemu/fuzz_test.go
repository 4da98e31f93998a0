package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/qmp"
	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/fstype"
)

// asBytes sends raw bytes as a message.
type asBytes struct{}

func (asBytes) Name() string                         { return "proto" }
func (asBytes) Unmarshal(mem.BufferSlice, any) error { return nil }
func (asBytes) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

// port echoes the marker of each connection, as a guest does.
type port struct{ net.Listener }

func (p port) Accept() (net.Conn, error) {
	c, err := p.Listener.Accept()
	if err == nil {
		marker := make([]byte, vport.MagicLength+vport.NonceLength)
		if _, err = io.ReadFull(c, marker); err == nil {
			_, err = c.Write(marker)
		}
	}
	return c, err
}

// liar is a microVM with a volume, whose guest answers every call with answer.
type liar struct {
	box    *machine
	answer func() ([]byte, error)
}

var ofLiar = sandbox.Volume{Device: mounter.Device{Path: "/nowhere", Major: 7, Minor: 1}}

func newLiar(f testing.TB) *liar {
	f.Helper()
	dir, err := os.MkdirTemp("", "liar")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { os.RemoveAll(dir) })
	listen := func(name string) net.Listener {
		l, err := net.Listen("unix", filepath.Join(dir, name))
		if err != nil {
			f.Fatal(err)
		}
		f.Cleanup(func() { l.Close() })
		return l
	}
	monitor, channel := listen("qmp"), listen("port")
	go func() {
		c, err := monitor.Accept()
		if err != nil {
			return
		}
		fmt.Fprint(c, `{"QMP": {}}`)
		for d := json.NewDecoder(c); ; {
			var m struct{ ID uint64 }
			if d.Decode(&m) != nil {
				return
			}
			fmt.Fprintf(c, `{"return": [{"name": %q}], "id": %d}`, ofLiar.Serial(), m.ID)
		}
	}()
	l := &liar{}
	g := grpc.NewServer(grpc.ForceServerCodecV2(asBytes{}), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		b, err := l.answer()
		if err != nil {
			return err
		}
		return s.SendMsg(&b)
	}))
	f.Cleanup(g.Stop)
	go func() { _ = g.Serve(port{channel}) }()
	how := registration{QMP: filepath.Join(dir, "qmp"), Channel: filepath.Join(dir, "port")}
	q, err := qmp.Dial(f.Context(), how.QMP)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { q.Close() })
	conn, err := how.dial(time.Minute)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { conn.Close() })
	l.box = &machine{how: how, q: q, conn: conn, guest: guestv1.NewGuestClient(conn), gone: make(chan struct{})}
	return l
}

// isPlain tells whether a guest's text is short and safe to show.
func isPlain(s string) bool { return len(s) <= plain.Most+100 && plain.Text(s, len(s)) == s }

// methods counts those that try knows.
const methods = 6

// try lets the guest answer a call with a message and meaningless extra bytes, or with a refusal.
// The host must take no more from it than short plain text, non-negative numbers, and a refusal
// that means only that.
func (l *liar) try(t *testing.T, method uint8, message []byte, more, code uint32, text string) {
	t.Helper()
	answer := append(make([]byte, 0, len(message)+int(more)+10), message...)
	if more > 0 {
		const unknown = 1000
		answer = protowire.AppendBytes(protowire.AppendTag(answer, unknown, protowire.BytesType), make([]byte, more))
	}
	l.answer = func() ([]byte, error) {
		if code != 0 {
			return nil, status.Error(codes.Code(code), text)
		}
		return answer, nil
	}
	b := &Backend{dir: t.TempDir(), timeout: time.Minute, log: slog.New(slog.DiscardHandler), asked: map[*machine]chan struct{}{}}
	s := &machine{b: b, how: l.box.how, q: l.box.q, conn: l.box.conn, guest: l.box.guest, gone: l.box.gone}
	if c := codes.Code(code); c == codes.Unavailable || c == codes.Canceled {
		gone := make(chan struct{})
		close(gone)
		s.gone = gone // otherwise it waits for the end
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	base := live(len(answer))
	taken := true
	var err error
	show := map[string]string{}
	switch method % methods {
	case 0:
		facts, asked := b.ask(ctx, s)
		if taken = asked == nil; taken {
			show["kernel"] = facts.Kernel
		}
		for _, name := range facts.FileSystems {
			if !slices.Contains(fstype.OnDevices(), name) {
				t.Errorf("the guest mounts %q", name)
			}
		}
		if _, err := b.ask(ctx, s); err == nil && len(facts.FileSystems) > 0 {
			l.answer = func() ([]byte, error) {
				return proto.Marshal(&guestv1.InfoResponse{Kernel: "other", FileSystems: []string{"ext2"}})
			}
			if _, err := b.ask(ctx, s); err != nil || b.known.Kernel != facts.Kernel ||
				!slices.Equal(b.known.FileSystems, facts.FileSystems) {
				t.Errorf("a later guest changed %+v to %+v (%v)", facts, b.known, err)
			}
		}
	case 1:
		var place sandbox.Place
		sctx, recorder := traced(ctx)
		place, err = s.Publish(sctx, ofLiar)
		if n := len(recorder.Ended()); n > 2+len(shown) {
			t.Errorf("%d spans", n)
		}
		show["device"], show["path"] = place.Device, place.Path
	case 2:
		var u mounter.Usage
		u, show["ailment"], err = s.Stats(ctx, ofLiar)
		if min(u.TotalBytes, u.AvailableBytes, u.UsedBytes, u.TotalInodes, u.AvailableInodes, u.UsedInodes) < 0 {
			t.Errorf("%+v", u)
		}
	case 3:
		show["path"], err = s.Resolve(ctx, ofLiar, "sub")
	case 4:
		var out []byte
		if out, _, err = s.Exec(ctx, []string{"/bin/true"}, nil); len(out) > 512<<10 {
			t.Errorf("%d bytes of output", len(out))
		}
	case 5:
		err = s.Expand(ctx, ofLiar, 1<<20)
	}
	if taken && err == nil && len(answer) > 1<<20 {
		t.Errorf("an answer of %d bytes is taken", len(answer))
	}
	for what, text := range show {
		if !isPlain(text) {
			t.Errorf("%s of %d bytes: %.200q", what, len(text), text)
		}
	}
	if st, ok := status.FromError(err); err != nil {
		allowed := fault.Is(err, fault.State) || fault.Is(err, fault.Invalid) ||
			ok && slices.Contains([]codes.Code{codes.DeadlineExceeded, codes.Canceled, codes.Unavailable}, st.Code())
		if !allowed || !isPlain(err.Error()) {
			t.Errorf("%s (%d) became %v, %.300q", codes.Code(code), code, fault.KindOf(err), err)
		}
	}
	if used := live(len(answer)) - base; used > 32<<20 {
		t.Errorf("%d bytes are kept of an answer of %d", used, len(answer))
	}
	runtime.KeepAlive(answer)
}

// FuzzGuest is a guest with arbitrary answers.
func FuzzGuest(f *testing.F) {
	l := newLiar(f)
	add := func(method uint8, m proto.Message, more uint32) {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(method, b, more, uint32(0), "")
	}
	add(0, &guestv1.InfoResponse{Kernel: "6.12\x1b[2J", FileSystems: []string{"ext4", "proc", "xfs", "\n"}, Selinux: true}, 0)
	add(1, &guestv1.MountResponse{Path: "/run/crust\u202e\x1b]0;t\a", Device: string(bytes.Repeat([]byte("/dev/sda"), 1000))}, 0)
	add(1, &guestv1.MountResponse{Steps: []*guestv1.Step{{Kind: 1, Begin: -1 << 63, End: 1<<63 - 1}, {Kind: 2}, {Kind: 2}, {Kind: -1}}}, 0)
	add(2, &guestv1.StatsResponse{TotalBytes: -1, AvailableBytes: -1 << 63, UsedBytes: -2, TotalInodes: -3, AvailableInodes: -4,
		UsedInodes: -5, Ailment: "\x1b[31m"}, 0)
	add(3, &guestv1.ResolveResponse{Path: "\r\n/etc/shadow"}, 0)
	add(4, &guestv1.ExecResponse{Output: []byte("\x00\xff"), ExitCode: -1}, 0)
	add(4, &guestv1.ExecResponse{}, 600<<10)
	f.Add(uint8(5), []byte{}, uint32(0), uint32(codes.OK), "")
	f.Add(uint8(1), []byte{0xff}, uint32(0), uint32(codes.OK), "")
	for _, c := range []codes.Code{codes.NotFound, codes.InvalidArgument, codes.Unavailable, codes.DeadlineExceeded,
		codes.AlreadyExists, codes.Internal, 4711} {
		f.Add(uint8(c), []byte{}, uint32(0), uint32(c), "\x1b[2Jno \u202e such \x00 volume")
	}
	f.Fuzz(func(t *testing.T, method uint8, message []byte, more, code uint32, text string) {
		const most = 1 << 20
		l.try(t, method, message, more%most, code, text)
	})
}

// TestGuestThatSaysALot is FuzzGuest with large answers.
func TestGuestThatSaysALot(t *testing.T) {
	l := newLiar(t)
	for method := range uint8(methods) {
		l.try(t, method, nil, 100<<20, 0, "")
	}
}

// live returns the heap in use, in bytes; 0 for answers too small to matter.
func live(size int) int64 {
	if size < 1<<20 {
		return 0
	}
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
