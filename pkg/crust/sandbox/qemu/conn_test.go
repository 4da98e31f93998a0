package qemu

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// C20: gRPC queues what it has to tell a guest that sends without end and takes nothing.
func TestC20_AGuestThatTakesNothingIsGivenUp(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	c := &guestConn{ours, time.Second, rate.NewLimiter(heard, atOnce)}
	wrote, read := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := c.Write([]byte("x"))
		wrote <- err
		_, err = theirs.Read(make([]byte, 1))
		read <- err
	}()
	for what, c := range map[string]struct {
		got  chan error
		want error
	}{"a write that nobody takes": {wrote, os.ErrDeadlineExceeded}, "the connection": {read, io.EOF}} {
		select {
		case err := <-c.got:
			if !errors.Is(err, c.want) {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(time.Minute):
			t.Errorf("%s goes on", what)
		}
	}
}

// C20: a guest that sends as fast as it can takes little of crustd's processor.
func TestC20_AGuestIsHeardAtALimitedRate(t *testing.T) {
	t.Parallel()
	how, l := guestsPort(t)
	took := make(chan time.Duration, 1)
	go func() {
		c, err := port{l}.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0})                                            // HTTP/2's SETTINGS
		frame := append([]byte{0, 0x40, 0, 0xee, 0, 0, 0, 0, 0}, bytes.Repeat([]byte{0}, 16<<10)...) // of an unknown type
		begin := time.Now()
		for range (atOnce + 2*heard) / (16 << 10) {
			if _, err := c.Write(frame); err != nil {
				return
			}
		}
		took <- time.Since(begin)
	}()
	conn, err := how.dial(time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() { _, _ = guestv1.NewGuestClient(conn).Stats(t.Context(), &guestv1.StatsRequest{}) }()
	select {
	case d := <-took: // the last second's bytes may be on the way
		if d < time.Second {
			t.Errorf("three seconds' worth of bytes took %s", d)
		}
	case <-time.After(time.Minute):
		t.Error("it is not heard at all")
	}
}

// C20: only a report of all volumes, and what a program in the sandbox writes, may be long.
func TestC20_AnAnswerOfAGuestIsShort(t *testing.T) {
	l := newLiar(t)
	long := func(size int) ([]byte, error) {
		const unknown = 1000
		return protowire.AppendBytes(protowire.AppendTag(nil, unknown, protowire.BytesType), make([]byte, size)), nil
	}
	l.answer = func() ([]byte, error) { return long(16 << 10) }
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := l.box.guest.Stats(ctx, &guestv1.StatsRequest{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a long answer: %v", err)
	}
	l.answer = func() ([]byte, error) { return long(100 << 10) }
	b := &Backend{dir: t.TempDir(), log: slog.New(slog.DiscardHandler)}
	if _, err := b.ask(ctx, l.box); err != nil {
		t.Errorf("a report: %v", err)
	}
	if _, _, err := l.box.Exec(ctx, []string{"cat"}, nil); err != nil {
		t.Errorf("a program's output: %v", err)
	}
}
