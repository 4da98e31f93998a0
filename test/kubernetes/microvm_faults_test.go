//go:build kubernetes && fleet

package kubernetes_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Thirty times something that a pod in a microVM needs is killed while such pods start and stop. Every pod runs in the end, what was
// written out is there, and nothing is left.
func TestFleet_C18_C24_MicroVMsAreKilledThirtyTimes(t *testing.T) {
	s := useMicroVMs(t)
	crustctl, err := filepath.Abs("../../.cache/image/bin/amd64/crustctl")
	if err != nil {
		t.Fatal(err)
	}
	// Of some guest. The pattern must not match the shell that has it in its arguments.
	inGuest := func(pattern string) string {
		crustctl := crustctl + " --crust unix:///run/crust/vm/crust.sock sandbox"
		return crustctl + ` exec $(` + crustctl + ` list | awk 'NR > 1 {print $1}' | shuf -n 1) sh -c "kill -9 \$(busybox pgrep -f '` +
			pattern + `')"`
	}
	victims := []string{
		"pkill -KILL -n -x qemu-system-x86", "pkill -KILL -n -x virtiofsd", "pkill -KILL -n passt", "pkill -KILL -n -f ' [p]od-monitor '",
		"pkill -KILL -f '[c]rustd .*--backend=qemu'", "pkill -KILL -x crust-agent", "kill -KILL $(cat /run/test/containerd.pid)",
		"kill -KILL $(cat /run/test/kubelet.pid)", inGuest("exe [-]-pod"), inGuest("^/proc/self/exe *$"),
	}
	const sets, rounds, settle = 2, 30, 10
	for i := range sets {
		s.claim(fmt.Sprintf("data-%d", i), "crust-sandbox", "64Mi", "ReadWriteOncePod")
	}
	pod := func(round int) string { return fmt.Sprintf("p-%d", round) }
	runs := func(pod, script string) (got string) {
		s.until(5*time.Minute, "a pod in a microVM runs", func() (string, bool) {
			var err error
			got, err = s.tryRun(pod, script)
			return fmt.Sprint(got, err, s.get("pod/"+pod, ".status")), err == nil
		})
		return got
	}
	var wrote [sets]int
	killed := map[string]int{}
	for round := range rounds {
		set, victim := round%sets, victims[round%len(victims)]
		s.apply(podText(pod(round), []string{fmt.Sprintf("data-%d:/data", set)}, microVM))
		if round >= sets-1 {
			s.try("delete", "pod", "-n", s.ns, pod(round-sets+1), "--grace-period=5", "--wait=false")
		}
		time.Sleep(time.Duration(rand.IntN(8000)) * time.Millisecond) // of an emulated guest's boot, and more
		if _, err := onNodeIn("/", victim); err == nil {
			killed[victim]++
		}
		if round%settle == settle-1 {
			settled(s)
			runs(pod(round), fmt.Sprintf("echo %d >>/data/rounds; sync", round))
			wrote[set] = round
		}
	}
	t.Logf("killed: %v", killed)
	settled(s)
	s.until(5*time.Minute, "one pod is left, and runs", func() (string, bool) {
		got := s.kubectl("get", "pods", "-n", s.ns, "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.phase} {end}`)
		return got, strings.TrimSpace(got) == pod(rounds-1)+" Running"
	})
	s.delete(pod(rounds - 1))
	for i := range sets {
		name, claim := fmt.Sprintf("last-%d", i), fmt.Sprintf("data-%d", i)
		s.apply(podText(name, []string{claim + ":/data"}, microVM))
		if got := runs(name, "cat /data/rounds || true"); wrote[i] > 0 && !strings.HasSuffix(got, fmt.Sprint(wrote[i])) {
			t.Errorf("%s has %q, and not the last of what was written out, %d", claim, got, wrote[i])
		}
		s.onlyPlaceholder(name, claim)
	}
	for _, name := range []string{"[q]emu-system-", "[p]od-monitor "} {
		if got := onNode(t, "pgrep -f -c '"+name+"' || true"); got != fmt.Sprint(sets) {
			t.Errorf("%d pods have %s processes %s", sets, got, name)
		}
	}
}
