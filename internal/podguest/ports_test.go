package podguest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

const (
	v4 = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 0100007F:1F90 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
   3: 0100007F:0051 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
`
	v6 = `  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:0052 00000000000000000000000000000000:0000 0A 0
   1: 0000000000000000FFFF00000200000A:0053 0:0 0A 0
   2: 00000000000000000000000000000000:0051 00000000000000000000000000000000:0000 0A 0
`
)

// Of port 53 a server on a loopback address and one on the pod's; servers on loopback addresses, on all, and on a mapped one; a client
// whose port the kernel chose, and a socket that has a peer.
const (
	udp = `   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
   98: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 5 2 0 0
   99: 0200630A:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 5 2 0 0
  100: 3500007F:0036 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 5 2 0 0
  101: 00000000:007B 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 6 2 0 0
  102: 00000000:9C40 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 7 2 0 0
  103: 0100007F:1F90 0100007F:0035 01 00000000:00000000 00:00000000 00000000     0        0 8 2 0 0
`
	udp6 = `  sl  local_address                         remote_address                        st
  104: 0000000000000000FFFF00000900007F:007C 00000000000000000000000000000000:0000 07 0
`
)

func TestC24_WhereContainersListen(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"tcp": v4, "tcp6": v6, "udp": udp, "udp6": udp6} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	places, err := listening(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range places {
		text := fmt.Sprint(map[bool]string{false: "tcp ", true: "udp "}[p.udp], p.host, " ", p.port)
		if p.loopback {
			text += " only the pod"
		}
		got = append(got, text)
	}
	want := []string{
		"tcp 127.0.0.1 80 only the pod", "tcp ::1 81", "tcp ::1 82 only the pod", "tcp 10.0.0.2 83", "tcp 127.0.0.1 8080",
		"udp 10.99.0.2 53", "udp 127.0.0.53 54 only the pod", "udp 127.0.0.1 123", "udp 127.0.0.9 124 only the pod",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func FuzzListening(f *testing.F) {
	f.Add([]byte(v4))
	f.Add([]byte(v6))
	f.Add([]byte(udp))
	f.Add([]byte(udp6))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		for _, name := range []string{"tcp", "udp"} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := listening(dir); err != nil {
			t.Error(err)
		}
	})
}

func TestKilledForWantOfMemory(t *testing.T) {
	for events, want := range map[string]int{
		"low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n": 2, "oom 1\noom_kill 0\n": 0, "oom_kill x\n": 0, "": 0,
	} {
		if got := killsIn(events); got != want {
			t.Errorf("%q: %d", events, got)
		}
	}
}

func TestTheReasonInRuncsLog(t *testing.T) {
	for log, want := range map[string]string{
		`time="2026" level=warning msg="a"` + "\n" + `time="2026" level=error msg="create failed: exec: \"/x\": none"` + "\n": `create failed: exec: "/x": none`,
		"plain\n": "plain",
		"":        "runc: exit",
	} {
		if got := reason(log, fmt.Errorf("exit")); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}
