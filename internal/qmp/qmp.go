// Package qmp is a client of the QEMU Machine Protocol: it matches answers to commands by number,
// and delivers events to listeners.
package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/paced"
	"github.com/crust-csi/crust-csi/internal/plain"
)

// Event is an asynchronous message from QEMU.
type Event struct {
	Name string          `json:"event"`
	Data json.RawMessage `json:"data"`
}

// Error is QEMU's refusal of a command.
type Error struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *Error) Error() string { return "QEMU: " + plain.Text(e.Desc, plain.Most) }

// ErrGone means that the connection has ended, as it does with QEMU.
var ErrGone = errors.New("QEMU has ended, or closed its QMP socket")

type message struct {
	Return json.RawMessage `json:"return"`
	Error  *Error          `json:"error"`
	ID     uint64          `json:"id"`
	Event
}

// Client is one connection.
type Client struct {
	conn *net.UnixConn
	gone chan struct{}

	write sync.Mutex
	mu    sync.Mutex
	next  uint64
	wait  map[uint64]chan message
	subs  map[chan Event]bool
}

// maxMessage limits a single message from QEMU, in bytes.
const maxMessage = 4 << 20

// heard limits what QEMU may send in a second, in bytes: a guest can cause events as fast as it can write to an I/O port.
const heard = 4 << 20

// maxEvent limits an event, in bytes: many are queued for listeners. QEMU's events have a few
// hundred bytes.
const maxEvent = 64 << 10

// Dial connects to a QMP socket and prepares it for commands.
func Dial(ctx context.Context, socket string) (*Client, error) {
	raw, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	c := &Client{conn: raw.(*net.UnixConn), gone: make(chan struct{}), wait: map[uint64]chan message{}, subs: map[chan Event]bool{}}
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.conn.SetReadDeadline(deadline); err != nil {
			return nil, errors.Join(err, c.conn.Close())
		}
	}
	limited := &io.LimitedReader{R: paced.Reader{R: c.conn, Limit: rate.NewLimiter(heard, maxMessage)}, N: maxMessage}
	d := json.NewDecoder(limited)
	var greeting struct{ QMP json.RawMessage }
	if err := d.Decode(&greeting); err != nil || greeting.QMP == nil {
		return nil, errors.Join(fmt.Errorf("%s: no QMP greeting", socket), err, c.conn.Close())
	}
	if err := c.conn.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(err, c.conn.Close())
	}
	go c.read(d, limited)
	if err := c.Run(ctx, "qmp_capabilities", nil, nil); err != nil {
		return nil, errors.Join(err, c.conn.Close())
	}
	return c, nil
}

// PID returns the process that serves the socket, 0 if it is in another pid namespace (SO_PEERCRED,
// unix(7)).
func (c *Client) PID() (int, error) {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	peer, err := linux.PeerOf(raw)
	return peer.PID, err
}

// Gone is closed when the connection ends.
func (c *Client) Gone() <-chan struct{} { return c.gone }

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

func (c *Client) read(d *json.Decoder, limited *io.LimitedReader) {
	defer close(c.gone)
	for {
		limited.N = maxMessage
		begin := d.InputOffset()
		var m message
		if err := d.Decode(&m); err != nil {
			_ = c.conn.Close() // it has ended
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, w := range c.wait {
				close(w)
			}
			c.wait = nil
			return
		}
		c.mu.Lock()
		if m.Name != "" {
			if d.InputOffset()-begin > maxEvent {
				c.mu.Unlock()
				continue
			}
			for s := range c.subs {
				select {
				case s <- m.Event:
				default: // nobody waits for that many
				}
			}
		} else if w, ok := c.wait[m.ID]; ok {
			delete(c.wait, m.ID)
			w <- m
		}
		c.mu.Unlock()
	}
}

// Events returns events from now on. Call it before the command that causes them, and call stop
// afterwards.
func (c *Client) Events() (events <-chan Event, stop func()) {
	s := make(chan Event, 64)
	c.mu.Lock()
	c.subs[s] = true
	c.mu.Unlock()
	return s, func() { c.mu.Lock(); delete(c.subs, s); c.mu.Unlock() }
}

// Run executes a command. args and out may be nil.
func (c *Client) Run(ctx context.Context, command string, args, out any) error {
	return c.run(ctx, command, args, out, nil)
}

// RunWithFile executes a command that takes a descriptor.
func (c *Client) RunWithFile(ctx context.Context, command string, args, out any, f *os.File) error {
	return c.run(ctx, command, args, out, f)
}

func (c *Client) run(ctx context.Context, command string, args, out any, f *os.File) error {
	w := make(chan message, 1)
	c.mu.Lock()
	if c.wait == nil {
		c.mu.Unlock()
		return ErrGone
	}
	c.next++
	id := c.next
	c.wait[id] = w
	c.mu.Unlock()
	defer func() { c.mu.Lock(); delete(c.wait, id); c.mu.Unlock() }()
	m := map[string]any{"execute": command, "id": id}
	if args != nil {
		m["arguments"] = args // QEMU refuses null
	}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	b = append(b, '\n')
	c.write.Lock()
	// A write past its deadline would end the connection, which all callers share.
	if err := ctx.Err(); err != nil {
		c.write.Unlock()
		return err
	}
	// A QEMU that does not read must not block those that wait for the lock.
	const patience = 10 * time.Second
	deadline := time.Now().Add(patience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := c.conn.SetWriteDeadline(deadline); err != nil {
		c.write.Unlock()
		return err
	}
	if f != nil {
		err = linux.SendFile(c.conn, b, f)
	} else {
		_, err = c.conn.Write(b)
	}
	c.write.Unlock()
	if err != nil {
		// A partial write cannot be undone.
		return errors.Join(fmt.Errorf("%w: %w", ErrGone, err), c.conn.Close())
	}
	select {
	case r, ok := <-w:
		switch {
		case !ok:
			return ErrGone
		case r.Error != nil:
			return fmt.Errorf("%s: %w", command, r.Error)
		case r.Return == nil:
			return fmt.Errorf("%s: QEMU's answer says neither that it was done nor that it failed", command)
		case out == nil:
			return nil
		}
		if err := json.Unmarshal(r.Return, out); err != nil {
			return fmt.Errorf("%s: QEMU's answer makes no sense: %s", command, plain.Text(err.Error(), plain.Most))
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", command, ctx.Err())
	}
}
