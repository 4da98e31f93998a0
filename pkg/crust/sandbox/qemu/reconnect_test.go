package qemu

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/vport"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// C20: a guest is heard at a limited rate, however often it breaks its connection, and whether or not it has begun one.
func TestC20_AGuestThatBreaksItsConnectionsIsHeardAtALimitedRate(t *testing.T) {
	t.Parallel()
	const call = 5 * time.Second
	frames := bytes.Repeat([]byte{0, 0, 1, 0xee, 0, 0, 0, 0, 0, 0}, atOnce/11) // of an unknown type
	// HTTP/2's SETTINGS, with MAX_CONCURRENT_STREAMS 0: no call is ever sent, so gRPC tries it again by itself, without a pause.
	settings := []byte{0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0}
	impossible := bytes.Repeat([]byte{0xff}, 64)
	for name, guest := range map[string]func(c net.Conn, marker []byte, sent *atomic.Int64){
		"it sends, and breaks the connection": func(c net.Conn, marker []byte, sent *atomic.Int64) {
			for _, b := range [][]byte{marker, settings, frames, impossible} {
				n, _ := c.Write(b)
				sent.Add(int64(n))
			}
			_, _ = io.Copy(io.Discard, c)
		},
		"it breaks the connection": func(c net.Conn, marker []byte, sent *atomic.Int64) {
			_, _ = c.Write(append(append(marker, settings...), impossible...))
			_, _ = io.Copy(io.Discard, c)
		},
		"it begins none": func(c net.Conn, _ []byte, sent *atomic.Int64) {
			for b, err := make([]byte, 64<<10), error(nil); err == nil; {
				var n int
				n, err = c.Write(b)
				sent.Add(int64(n))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			how, l := guestsPort(t)
			var sent, connections atomic.Int64
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					connections.Add(1)
					marker := make([]byte, vport.MagicLength+vport.NonceLength)
					if _, err := io.ReadFull(c, marker); err == nil {
						guest(c, marker, &sent)
					}
					c.Close()
				}
			}()
			conn, err := how.dial(time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			begin := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), call)
			defer cancel()
			_, _ = guestv1.NewGuestClient(conn).Stats(ctx, &guestv1.StatsRequest{})
			took, n := time.Since(begin).Seconds()+1, sent.Load()
			t.Logf("%d bytes, %d connections", n, connections.Load())
			if most := int64(atOnce + took*heard); n > most {
				t.Errorf("%d bytes were heard, and %d is the limit", n, most)
			}
			if most := int64((took + 1) * dialled); connections.Load() > most {
				t.Errorf("%d connections, and %d is the limit", connections.Load(), most)
			}
			if connections.Load() == 0 {
				t.Error("it was not dialled")
			}
		})
	}
}
