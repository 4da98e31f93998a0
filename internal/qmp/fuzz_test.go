package qmp

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/plain"
)

// qemu answers on a socket: a greeting, the first command, and then answer to the second. It then
// hangs up, and reports how many bytes of answer were read.
func qemu(t *testing.T, greeting, answer []byte) (socket string, taken <-chan int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	done, all := make(chan int, 1), 0
	go func() {
		defer func() { done <- all }()
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		all, _ = c.Write(greeting)
		var m map[string]any
		if json.Unmarshal(greeting, &m) != nil {
			return // the rest is waited for
		}
		d := json.NewDecoder(c)
		if d.Decode(&m) != nil {
			return
		}
		_, _ = io.WriteString(c, `{"return": {}, "id": 1}`)
		if d.Decode(&m) == nil {
			n, _ := c.Write(answer)
			all += n
		}
	}()
	return path, done
}

// success reports whether a stream contains a "return" answer to command 2.
func success(stream []byte) bool {
	d := json.NewDecoder(bytes.NewReader(stream))
	for {
		var m map[string]json.RawMessage
		if d.Decode(&m) != nil {
			return false
		}
		var id uint64
		returned := false
		for key, value := range m {
			switch {
			case strings.EqualFold(key, "return"):
				returned = true
			case strings.EqualFold(key, "id"):
				_ = json.Unmarshal(value, &id)
			}
		}
		if returned && id == 2 {
			return true
		}
	}
}

// said is what a QEMU sends: a greeting, and an answer to the second command that repeats the
// filler many times.
type said struct {
	greeting, before, filler string
	times                    int
	after                    string
}

const hello = `{"QMP": {"version": {}, "capabilities": []}}`

// try makes the QEMU send it, and checks the outcome: no command succeeds without such an answer,
// at worst the connection ends, and neither text nor unread events use much memory. It returns the
// number of bytes read.
func try(t *testing.T, s said, list any) int {
	t.Helper()
	answer := []byte(s.before + strings.Repeat(s.filler, s.times) + s.after)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	base := live(len(answer))
	socket, taken := qemu(t, []byte(s.greeting), answer)
	c, err := Dial(ctx, socket)
	if err != nil {
		return <-taken
	}
	defer c.Close()
	events, stop := c.Events()
	defer stop()
	err = c.Run(ctx, "qom-list", nil, list)
	if err == nil && !success(answer) {
		t.Errorf("a success out of %.200q", answer)
	}
	if err != nil {
		if text := err.Error(); len(text) > 2*plain.Most || plain.Lines(text, len(text)) != text {
			t.Errorf("an error of %d bytes: %.200q", len(text), text)
		}
	}
	<-c.Gone()
	if used := live(len(answer)) - base; used > 16<<20 {
		t.Errorf("%d bytes are kept of %d, in %d events", used, len(answer), len(events))
	}
	runtime.KeepAlive(answer)
	return <-taken
}

type names []struct {
	Name string
	ID   int
}

// FuzzQEMU is a QEMU that a guest has taken over.
func FuzzQEMU(f *testing.F) {
	for _, s := range []said{
		{hello, `{"return": [{"name": "disk"}], "id": 2}`, "", 0, ""},
		{hello, `{"error": {"class": "GenericError", "desc": "Failed to find node`, `\u001b[2J`, 1000, `"}, "id": 2}`},
		{hello, `{"id": 2}`, "", 1, ""},
		{hello, `{"return": null, "error": null, "id": 2}`, "", 1, ""},
		{hello, `{"return": [{"name": `, "1", 1 << 12, `}], "id": 2}`},
		{hello, `{"return": {}, "id": 3}`, "\n", 5, `{"return": "x", "id": "2"}`},
		{hello, `{"event": "E", "data": 1}`, `{"event": "E"}`, 100, `{"return": [], "id": 2}`},
		{hello, "", "[", 20000, ""},
		{`{"QMP"`, "", "", 0, ""},
		{`{}`, "", "", 0, ""},
	} {
		f.Add([]byte(s.greeting), []byte(s.before), []byte(s.filler), uint16(s.times), []byte(s.after), s.times == 1)
	}
	f.Fuzz(func(t *testing.T, greeting, before, filler []byte, times uint16, after []byte, ignored bool) {
		const most = 1 << 16
		s := said{string(greeting), string(before), string(filler), min(int(times), most/max(len(filler), 1)), string(after)}
		if ignored {
			try(t, s, nil) // a command whose answer does not matter
		} else {
			try(t, s, &names{})
		}
	})
}

// TestQEMUThatSaysALot is FuzzQEMU for slow cases.
func TestQEMUThatSaysALot(t *testing.T) {
	half := strings.Repeat("x", 1<<19)
	for name, s := range map[string]said{
		"100 MiB of an answer":  {hello, `{"return": "`, "x", 100 << 20, `", "id": 2}`},
		"100 MiB of space":      {hello, "", " ", 100 << 20, `{"return": [], "id": 2}`},
		"large events":          {hello, "", `{"event": "E", "data": "` + half + `"}`, 40, `{"return": [], "id": 2}`},
		"events of large names": {hello, "", `{"event": "` + half + `"}`, 40, `{"return": [], "id": 2}`},
		"a long number":         {hello, `{"return": [{"id": `, "1", 1 << 20, `}], "id": 2}`},
		"a long refusal":        {hello, `{"error": {"desc": "`, "no ", 1 << 20, `"}, "id": 2}`},
		"100 MiB of a greeting": {hello[:1] + strings.Repeat(" ", 100<<20) + hello[1:], "", "", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if n := try(t, s, &names{}); strings.Contains(name, "100 MiB") && n > 16<<20 {
				t.Errorf("%d bytes of one message were taken", n)
			}
		})
	}
}

// live returns the memory in use, for answers large enough to affect it.
func live(size int) int64 {
	if size < 1<<20 {
		return 0
	}
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
