// Package vport makes successive connections over one virtio-serial port.
//
// Such a port is one stream of bytes that outlives its host-side clients. When the host end is closed and quickly opened again, the guest
// may see no end of file in between, or see it after the new client's first bytes; and the guest's last output is delivered to the new
// client. So each connection begins with a marker that both ends wait for:
//
//	host to guest   magic (16 bytes), nonce (16 bytes)
//	guest to host   the same
//
// The guest searches all input for the magic. A magic ends the current connection, which may have received the marker's first bytes. The
// host discards everything before its own nonce. The magic is chosen anew for each boot, so that no data matches it by chance.
package vport

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// MagicLength and NonceLength are the lengths of a marker's parts, in bytes.
const (
	MagicLength = 16
	NonceLength = 16
)

// DefaultMagic is for guests without a configured magic.
var DefaultMagic = []byte("\x00\xffcrust-guest\xfe\xfd\x00")

// maxStale limits what a guest may send before it echoes a marker, in bytes.
const maxStale = 64 << 20

// Dial connects to the socket that QEMU serves for the port, and waits for the guest's echo until ctx ends.
func Dial(ctx context.Context, socket string, magic []byte) (net.Conn, error) {
	return DialThrough(ctx, socket, magic, func(c net.Conn) net.Conn { return c })
}

// DialThrough is Dial, but reads and writes go through the connection that through returns, from the first byte on.
func DialThrough(ctx context.Context, socket string, magic []byte, through func(net.Conn) net.Conn) (_ net.Conn, err error) {
	if len(magic) == 0 {
		magic = DefaultMagic
	}
	if len(magic) != MagicLength {
		return nil, fmt.Errorf("a magic of %d bytes; it has %d", len(magic), MagicLength)
	}
	raw, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	c := through(raw)
	// QEMU serves one client: an abandoned one would keep all others out.
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer func() {
		if !stop() && err == nil {
			err = ctx.Err()
		}
		if err != nil {
			c.Close()
		}
	}()
	marker := make([]byte, MagicLength+NonceLength)
	copy(marker, magic)
	if _, err := rand.Read(marker[MagicLength:]); err != nil {
		return nil, err
	}
	if _, err := c.Write(marker); err != nil {
		return nil, err
	}
	var window []byte
	buf := make([]byte, 32<<10)
	for stale := 0; stale <= maxStale; {
		n, err := c.Read(buf)
		if err != nil {
			return nil, fmt.Errorf("the guest does not answer (%d stale bytes came): %w", stale, errors.Join(ctx.Err(), err))
		}
		window = append(window, buf[:n]...)
		if i := bytes.Index(window, marker); i >= 0 {
			// Data after the echo belongs to the connection.
			return &begun{Conn: c, rest: bytes.Clone(window[i+len(marker):])}, nil
		}
		stale += n
		window = bytes.Clone(window[max(0, len(window)-len(marker)+1):])
	}
	return nil, fmt.Errorf("the guest sent more than %d bytes and no echo", maxStale)
}

// begun is a connection whose first bytes have been read.
type begun struct {
	net.Conn
	rest []byte
}

func (b *begun) Read(p []byte) (int, error) {
	if len(b.rest) > 0 {
		n := copy(p, b.rest)
		b.rest = b.rest[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}

// Listener is the guest's end.
type Listener struct {
	port  *os.File
	magic []byte
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
	// write orders an old connection's last writes before the echo that begins the next: the kernel delivers them to whoever opens the
	// port then.
	write sync.Mutex
}

// Listen serves an open port.
func Listen(port *os.File, magic []byte) *Listener {
	if len(magic) != MagicLength {
		magic = DefaultMagic
	}
	l := &Listener{port: port, magic: magic, conns: make(chan net.Conn), done: make(chan struct{})}
	l.write.Lock() // until reset has written: no echo before that
	go l.reset()
	go l.read()
	return l
}

// reset breaks the connection of a previous agent, because the host does not see that its peer was killed. It writes invalid HTTP/2,
// longer than any incomplete frame, so that a host that waits for an answer disconnects; a host that connects anew drops it before its
// echo. Called with write locked.
func (l *Listener) reset() {
	const frame = 16 << 10
	defer l.write.Unlock()
	_, _ = l.port.Write(bytes.Repeat([]byte{0xff}, 2*frame)) // waits if nobody is connected
}

// Accept returns the next connection.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close ends the listener.
func (l *Listener) Close() error { l.once.Do(func() { close(l.done) }); return nil }

// Addr is the port's name.
func (l *Listener) Addr() net.Addr { return addr(l.port.Name()) }

type addr string

func (addr) Network() string  { return "virtio-serial" }
func (a addr) String() string { return string(a) }

// eofGrace is how long an end of file must last to count: it may come late, after the next client's first bytes.
const eofGrace = 500 * time.Millisecond

func (l *Listener) read() {
	var s splitter
	s.magic = l.magic
	s.begin = func(marker []byte) {
		l.write.Lock()
		_, err := l.port.Write(marker)
		l.write.Unlock()
		if err != nil {
			return
		}
		c := &conn{l: l, in: newQueue()}
		s.data = c.in.write
		s.end = func() { c.in.close(io.EOF); c.closed() }
		select {
		case l.conns <- c:
		case <-l.done:
		}
	}
	buf := make([]byte, 64<<10)
	for {
		l.wait()
		n, err := l.port.Read(buf)
		select {
		case <-l.done:
			s.finish()
			return
		default:
		}
		if n > 0 {
			s.take(buf[:n])
			continue
		}
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, linux.EAGAIN) {
			s.finish()
			time.Sleep(100 * time.Millisecond)
			continue
		}
		for since := time.Now(); ; {
			readable, hangup, perr := linux.PollFile(l.port, 0)
			if perr != nil || readable || !hangup {
				break
			}
			pause := 5 * time.Millisecond
			if away := time.Since(since); away > eofGrace {
				s.finish()
				// An emulated guest that polled constantly would keep a processor busy.
				pause = min(max(pause, away/20), 100*time.Millisecond)
			}
			time.Sleep(pause)
		}
	}
}

// lookAgain bounds how long bytes lie unseen that came without an interrupt.
const lookAgain = 50 * time.Millisecond

// wait waits until there is something to read, or nobody is connected. In some guests about one message of a hundred wakes nobody, and
// a reader that sleeps until it is woken would get it with the next. Whoever asks the driver, however, sees it.
func (l *Listener) wait() {
	for {
		readable, hangup, err := linux.PollFile(l.port, lookAgain)
		if readable || hangup || err != nil {
			return
		}
		select {
		case <-l.done:
			return
		default:
		}
	}
}

// splitter finds the markers in a stream and passes the data between them to the current connection.
type splitter struct {
	magic []byte
	begin func(marker []byte) // a connection begins; it sets data and end
	data  func([]byte)
	end   func()
	carry []byte // what may be the beginning of a marker
	given int    // bytes of carry already passed on: if it is no marker, no later data may come to release it
}

func (s *splitter) finish() {
	if s.end != nil {
		s.end()
		s.end, s.data = nil, nil
	}
	s.carry, s.given = nil, 0
}

func (s *splitter) give(b []byte) {
	if s.data != nil && len(b) > 0 {
		s.data(b)
	}
}

func (s *splitter) take(b []byte) {
	data, given := append(s.carry, b...), s.given
	s.carry, s.given = nil, 0
	for len(data) > 0 {
		i := bytes.Index(data, s.magic)
		if i < 0 {
			s.give(data[given:])
			s.carry = bytes.Clone(data[len(data)-overlap(data, s.magic):])
			s.given = len(s.carry)
			return
		}
		s.give(data[min(given, i):i])
		if len(data) < i+MagicLength+NonceLength {
			s.carry = bytes.Clone(data[i:])
			return
		}
		given = 0
		marker := bytes.Clone(data[i : i+MagicLength+NonceLength])
		s.finish()
		s.begin(marker)
		data = data[i+MagicLength+NonceLength:]
	}
}

// overlap returns how many bytes at the end of data are a prefix of magic.
func overlap(data, magic []byte) int {
	for k := min(len(magic)-1, len(data)); k > 0; k-- {
		if bytes.Equal(data[len(data)-k:], magic[:k]) {
			return k
		}
	}
	return 0
}

type conn struct {
	l    *Listener
	in   *queue
	mu   sync.Mutex
	over bool
}

func (c *conn) closed() { c.mu.Lock(); c.over = true; c.mu.Unlock() }

func (c *conn) Read(p []byte) (int, error) { return c.in.read(p) }

func (c *conn) Write(p []byte) (int, error) {
	c.l.write.Lock()
	defer c.l.write.Unlock()
	c.mu.Lock()
	over := c.over
	c.mu.Unlock()
	if over {
		return 0, net.ErrClosed
	}
	return c.l.port.Write(p)
}

func (c *conn) Close() error                     { c.closed(); c.in.close(net.ErrClosed); return nil }
func (c *conn) LocalAddr() net.Addr              { return c.l.Addr() }
func (c *conn) RemoteAddr() net.Addr             { return addr("host") }
func (c *conn) SetDeadline(time.Time) error      { return nil }
func (c *conn) SetReadDeadline(time.Time) error  { return nil }
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// queue is a pipe without a limit: the reader of the port must never wait for the user of a dead connection.
type queue struct {
	mu   sync.Mutex
	more *sync.Cond
	buf  bytes.Buffer
	err  error
}

func newQueue() *queue {
	q := &queue{}
	q.more = sync.NewCond(&q.mu)
	return q
}

func (q *queue) write(b []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.buf.Write(b)
		q.more.Broadcast()
	}
}

func (q *queue) read(b []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.buf.Len() == 0 && q.err == nil {
		q.more.Wait()
	}
	if q.buf.Len() == 0 {
		return 0, q.err
	}
	return q.buf.Read(b)
}

func (q *queue) close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
	}
	q.more.Broadcast()
}
