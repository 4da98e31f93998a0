package vport

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"time"
)

// stale is what a guest sends before its echo, times over, and then a part of the marker.
type stale struct {
	bytes  []byte
	times  int
	partly int
	echo   bool
	fresh  []byte // behind the echo
	step   int    // initial number of bytes per read
}

// try connects to such a guest: the connection begins after the echo of its own marker. Without an
// echo there is no connection, and an endless stream is cut off.
func try(t *testing.T, s stale) {
	t.Helper()
	before, sent, begun := s.times*len(s.bytes), make(chan int, 1), make(chan []byte, 1)
	path := guest(t, func(c net.Conn, marker []byte) {
		defer c.Close()
		said := append(bytes.Repeat(s.bytes, s.times), marker[:s.partly%len(marker)]...)
		if s.echo {
			said = append(append(said, marker...), s.fresh...)
		}
		if i := bytes.Index(said, marker); i >= 0 { // given a part of it, it may have it earlier
			begun <- said[i+len(marker):]
		}
		wrote := 0
		for wrote < len(said) {
			size := s.step + 1
			if wrote > 1<<12 { // many small pieces take long
				size = 1 << 16
			}
			k, err := c.Write(said[wrote:min(len(said), wrote+size)])
			if wrote += k; err != nil {
				break
			}
		}
		sent <- wrote
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := Dial(ctx, path, nil)
	const (
		bound   = 64 << 20
		buffers = 4 << 20 // of the socket
	)
	if err != nil {
		if s.echo && before < bound-buffers {
			t.Errorf("no connection after %d stale bytes: %v", before, err)
		}
		if n := <-sent; n > bound+buffers {
			t.Errorf("%d bytes were taken", n)
		}
		return
	}
	defer c.Close()
	got, err := io.ReadAll(c)
	switch {
	case !s.echo:
		t.Errorf("connected without an echo, reading %.100q", got)
	case before > bound+buffers:
		t.Errorf("connected after %d stale bytes", before)
	default:
		if want := <-begun; err != nil || !bytes.Equal(got, want) {
			t.Errorf("%.100q (%d bytes) became %.100q (%d bytes): %v", want, len(want), got, len(got), err)
		}
	}
}

// FuzzDial is the host's side of the port.
func FuzzDial(f *testing.F) {
	f.Add([]byte("stale"), uint16(1), uint8(20), []byte("fresh"), true, uint16(7))
	f.Add(DefaultMagic, uint16(3), uint8(31), []byte(""), true, uint16(0))
	f.Add(bytes.Repeat(DefaultMagic, 2), uint16(1), uint8(32), []byte("fresh"), false, uint16(40000))
	f.Add([]byte{0xff}, uint16(40000), uint8(0), bytes.Repeat([]byte("x"), 50_000), true, uint16(0xffff))
	f.Fuzz(func(t *testing.T, b []byte, times uint16, partly uint8, fresh []byte, echo bool, step uint16) {
		const most = 1 << 20
		try(t, stale{b, min(int(times), most/max(len(b), 1)), int(partly), echo, fresh, int(step)})
	})
}

func TestDialDoesNotListenForEver(t *testing.T) {
	for _, size := range []int{1 << 20, 80 << 20} {
		try(t, stale{make([]byte, 1<<16), size >> 16, 0, true, []byte("fresh"), 1 << 16})
	}
}
