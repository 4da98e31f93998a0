package vport

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// A possible beginning of a marker is nearly always the end of a message. Its sender waits for the
// answer before sending more.
func TestC16_NoByteWaitsForTheNext(t *testing.T) {
	var got []byte
	s := splitter{magic: DefaultMagic, data: func(b []byte) { got = append(got, b...) }, end: func() {}}
	for k := range MagicLength {
		got = nil
		said := append([]byte("a message"), DefaultMagic[:k]...)
		if s.take(said); !bytes.Equal(got, said) {
			t.Errorf("of %q came %q", said, got)
		}
	}
}

// FuzzSplitter: however the input is split, connections receive the data between the markers, and
// at most the beginning of the marker that ends it.
func FuzzSplitter(f *testing.F) {
	marker := append(bytes.Clone(DefaultMagic), make([]byte, NonceLength)...)
	f.Add([]byte("stale"), []byte("one"), []byte("two"), uint8(3))
	f.Add(DefaultMagic[:7], DefaultMagic[:15], []byte{0}, uint8(1))
	f.Fuzz(func(t *testing.T, stale, one, two []byte, step uint8) {
		if bytes.Contains(append(bytes.Clone(stale), append(bytes.Clone(one), two...)...), DefaultMagic[:4]) {
			return // by construction the data between contains no marker
		}
		stream := bytes.Join([][]byte{stale, marker, one, marker, two}, nil)
		var got [][]byte
		s := splitter{magic: DefaultMagic}
		s.begin = func(m []byte) {
			if !bytes.Equal(m, marker) {
				t.Fatal("another marker")
			}
			got = append(got, nil)
			s.data = func(b []byte) { got[len(got)-1] = append(got[len(got)-1], b...) }
			s.end = func() {}
		}
		for len(stream) > 0 {
			n := min(int(step)+1, len(stream))
			s.take(stream[:n])
			stream = stream[n:]
		}
		if len(got) != 2 || !bytes.HasPrefix(got[0], one) || !bytes.HasPrefix(DefaultMagic[:MagicLength-1], got[0][len(one):]) ||
			!bytes.Equal(got[1], two) {
			t.Fatalf("%q of %q and %q", got, one, two)
		}
	})
}

// guest answers on a socket as a guest would, or lies.
func guest(t *testing.T, answer func(c net.Conn, marker []byte)) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			marker := make([]byte, MagicLength+NonceLength)
			if _, err := io.ReadFull(c, marker); err == nil {
				answer(c, marker)
			}
		}
	}()
	return path
}

func TestDialDropsWhatIsStale(t *testing.T) {
	path := guest(t, func(c net.Conn, marker []byte) {
		old := bytes.Clone(marker)
		old[MagicLength]++ // of an earlier client
		for _, b := range [][]byte{[]byte("stale"), old, marker[:20], marker, []byte("fresh")} {
			_, _ = c.Write(b)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := Dial(ctx, path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "fresh" {
		t.Fatalf("%q %v", b, err)
	}
}

func TestDialGivesUpOnAGuestThatLies(t *testing.T) {
	for name, answer := range map[string]func(net.Conn, []byte){
		"never answers":   func(net.Conn, []byte) {},
		"the wrong nonce": func(c net.Conn, m []byte) { m[MagicLength]++; _, _ = c.Write(m) },
		"noise without end": func(c net.Conn, _ []byte) {
			b := make([]byte, 1<<16)
			_, _ = rand.Read(b)
			for {
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if c, err := Dial(ctx, guest(t, answer), nil); err == nil {
				c.Close()
				t.Fatal("connected")
			}
		})
	}
}

// If a host connected before the agent began, its marker is already in the port. The agent's bytes
// that break older connections must not come after the echo, or they break this one.
func TestAHostThatConnectedBeforeTheAgentIsNotDisturbed(t *testing.T) {
	marker := append(bytes.Clone(DefaultMagic), make([]byte, NonceLength)...)
	for range 300 {
		pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		host, port := os.NewFile(uintptr(pair[0]), "host"), os.NewFile(uintptr(pair[1]), "port")
		if _, err := host.Write(marker); err != nil {
			t.Fatal(err)
		}
		l := Listen(port, DefaultMagic)
		said := make([]byte, 2*16<<10+len(marker))
		if _, err := io.ReadFull(host, said); err != nil {
			t.Fatal(err)
		}
		if !bytes.HasSuffix(said, marker) {
			t.Fatalf("after the echo come %d bytes more", len(said)-bytes.Index(said, marker)-len(marker))
		}
		l.Close()
		host.Close()
		port.Close()
	}
}
