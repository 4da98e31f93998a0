// Package storm runs many callers on many volumes of one csi-node at once, legally and illegally,
// and kills it at random. A model judges each answer: it follows from a volume's state, and a
// refusal caused by the driver's own work is a failure.
package storm

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

func TestMain(m *testing.M) { testnode.Main(m) }

// setting reads a number from the environment; `make soak` sets larger ones.
func setting(t *testing.T, name string, usual int) int {
	t.Helper()
	s := os.Getenv(name)
	if s == "" {
		return usual
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatalf("%s=%q: %v", name, s, err)
	}
	return n
}

// leastKills is the minimum for a storm.
const leastKills = 6

type storm struct {
	t      *testing.T
	node   *testnode.Node
	client *csiclient.Client
	vols   []*vol
	kills  atomic.Int64
	calls  atomic.Int64 // that were answered

	mu     sync.Mutex
	counts map[string]int
	wrong  []string
	stop   context.Context
	end    context.CancelFunc
}

func TestA12_D06_AStormOfCallers(t *testing.T) {
	seconds, callers, volumes := setting(t, "CRUST_STORM_SECONDS", 0), setting(t, "CRUST_STORM_CALLERS", 64),
		setting(t, "CRUST_STORM_VOLUMES", 200)
	n := testnode.New(t, "")
	s := &storm{t: t, node: n, counts: map[string]int{}}
	var err error
	if s.client, err = csiclient.Dial(n.Endpoint(), n.KubeletDir(), grpc.WithUnaryInterceptor(testnode.PatientUnstage)); err != nil {
		t.Fatal(err)
	}
	defer s.client.Close()
	s.stop, s.end = context.WithTimeout(context.Background(), cmp.Or(time.Duration(seconds)*time.Second, 30*time.Minute))
	defer s.end()
	for i := range volumes {
		s.vols = append(s.vols, newVol(s, i))
	}
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for s.stop.Err() == nil {
				v := s.vols[rand.IntN(len(s.vols))]
				if rand.IntN(3) == 0 {
					v.read()
				} else if v.mu.TryLock() {
					v.step()
					v.mu.Unlock()
				}
			}
		})
	}
	for s.stop.Err() == nil {
		// Kills follow the answers and not the clock: a slow machine would lose its work to them.
		for next := s.calls.Load() + 600 + rand.Int64N(1200); s.stop.Err() == nil && s.calls.Load() < next; {
			time.Sleep(time.Millisecond)
		}
		s.kills.Add(1)
		n.Restart()
		s.kills.Add(1) // a call that began in between saw the old process too
		if seconds == 0 && s.kills.Load() >= 2*leastKills && s.count("publish OK") >= 5*volumes {
			s.end()
		}
	}
	wg.Wait()
	s.tearDown(callers)
	s.mu.Lock()
	defer s.mu.Unlock()
	t.Logf("%d kills; answers: %v", s.kills.Load()/2, s.counts)
	for i, w := range s.wrong {
		if i == 20 {
			t.Errorf("... and %d more", len(s.wrong)-i)
			break
		}
		t.Error(w)
	}
	if s.kills.Load() < 2*leastKills || s.counts["publish OK"] < 5*volumes {
		t.Errorf("this was no storm: %d kills, %v", s.kills.Load()/2, s.counts)
	}
}

// count returns how often this answer came.
func (s *storm) count(answer string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[answer]
}

// tearDown removes every volume, with this many callers.
func (s *storm) tearDown(callers int) {
	work := make(chan *vol)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for v := range work {
				v.mu.Lock()
				v.away()
				v.mu.Unlock()
			}
		})
	}
	for _, v := range s.vols {
		work <- v
	}
	close(work)
	wg.Wait()
	s.node.Restart()
	left := 0
	for _, dir := range []string{"/volumes", "/snapshots"} {
		entries, err := os.ReadDir(s.node.PoolDir() + dir)
		if err != nil {
			s.t.Error(err)
		}
		for _, e := range entries {
			left++
			s.t.Errorf("left in the pool: %s", e.Name())
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), s.node.KubeletDir()+"/") {
		s.t.Errorf("mounts are left (%v)", err)
	}
}

// call makes one call, repeats it while the process is away, and judges the answer.
func (s *storm) call(what string, f func(context.Context) error, want ...codes.Code) codes.Code {
	// Far more than any call takes: this finds calls that hang.
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	refusedSince := time.Now()
	for {
		kills := s.kills.Load()
		err := f(ctx)
		code := status.Code(err)
		killed := kills%2 == 1 || s.kills.Load() != kills
		if killed {
			refusedSince = time.Now()
		}
		// A process that serves and goes on refusing has lost something, for example its pool.
		if code == codes.Unavailable && ctx.Err() == nil && time.Since(refusedSince) < 5*time.Minute {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		// Work of a killed process may still be running, such as its mkfs.
		if code == codes.Aborted && killed && ctx.Err() == nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		s.calls.Add(1)
		s.judge(what, code, err, want)
		return code
	}
}

// openLoops lists which process has which loop device open: a refusal because a device is in use does not say who uses it.
func openLoops() (open []string) {
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && strings.HasPrefix(to, "/dev/loop") {
			process := strings.Split(fd, "/")[2]
			name, _ := os.ReadFile("/proc/" + process + "/comm") // it may have ended
			open = append(open, fmt.Sprintf("%s by %s %s", to, strings.TrimSpace(string(name)), process))
		}
	}
	return open
}

func (s *storm) judge(what string, code codes.Code, err error, want []codes.Code) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[strings.Fields(what)[0]+" "+code.String()]++
	for _, w := range want {
		if w == code {
			return
		}
	}
	text := fmt.Sprintf("%s: want %v, got %v", what, want, err)
	if code == codes.FailedPrecondition {
		text += "; open loop devices: " + strings.Join(openLoops(), ", ")
	}
	s.wrong = append(s.wrong, text)
	if len(s.wrong) > 100 {
		s.end()
	}
}
