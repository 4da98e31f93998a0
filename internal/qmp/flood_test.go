package qmp

import (
	"bufio"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// C20: a guest can cause events without end. They are read at a limited rate, and commands are answered all the same.
func TestC20_EventsWithoutEndAreReadAtALimitedRate(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "qmp")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var sent atomic.Int64
	stop := make(chan struct{})
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		in := bufio.NewReader(c)
		say := func(text string) bool {
			n, err := c.Write([]byte(text + "\r\n"))
			sent.Add(int64(n))
			return err == nil
		}
		answer := func(id string) {
			if _, err := in.ReadString('\n'); err == nil {
				say(`{"return": {}, "id": ` + id + `}`)
			}
		}
		say(`{"QMP": {"version": {}, "capabilities": []}}`)
		answer("1")
		event := strings.Repeat(`{"event": "ACPI_DEVICE_OST", "data": {"info": {"device": "d1", "source": 1, "status": 0}}}`+"\r\n", 100)
		for {
			select {
			case <-stop:
				answer("2")
				return
			default:
				say(event)
			}
		}
	}()
	c, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	begin := time.Now()
	time.Sleep(3 * time.Second)
	n, took := sent.Load(), time.Since(begin).Seconds()
	if most := int64(maxMessage + (took+1)*heard); n > most {
		t.Errorf("%d bytes of events were read in %.1f s, and %d is the limit", n, took, most)
	}
	close(stop)
	if err := c.Run(t.Context(), "query-status", nil, nil); err != nil {
		t.Errorf("a command: %v", err)
	}
}
