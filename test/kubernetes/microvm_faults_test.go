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
	// The process of some guest with such a command line. It is killed a moment later, because it may be the one that does this.
	inGuest := func(pattern string) string {
		crustctl := crustctl + " --crust unix:///run/crust/vm/crust.sock sandbox"
		return crustctl + ` exec $(` + crustctl + ` list | awk 'NR > 1 {print $1}' | shuf -n 1) sh -c 'for p in /proc/[0-9]*; do
			case "$(busybox tr "\0" " " <$p/cmdline)" in ` + pattern + `) k=${p#/proc/};; esac; done
			[ "$k" ] && { (busybox sleep 0.3; kill -9 $k) >/dev/null 2>&1 & }'`
	}
	victims := []string{
		"pkill -KILL -n -x qemu-system-x86", "pkill -KILL -n -x virtiofsd", "pkill -KILL -n passt", "pkill -KILL -n -f ' [p]od-monitor '",
		"pkill -KILL -f '[c]rustd .*--backend=qemu'", "pkill -KILL -x crust-agent", "kill -KILL $(cat /run/test/containerd.pid)",
		"kill -KILL $(cat /run/test/kubelet.pid)", inGuest(`"/proc/self/exe --pod"*`), inGuest(`"/proc/self/exe "`),
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
		for range 5 {                                                 // there may be none just now
			_, err := onNodeIn("/", victim)
			if err == nil {
				killed[victim]++
				break
			}
			t.Logf("round %d: nobody was killed: %v", round, err)
			time.Sleep(time.Second)
		}
		if round%settle == settle-1 {
			settled(s)
			runs(pod(round), fmt.Sprintf("echo %d >>/data/rounds; sync", round))
			wrote[set] = round
		}
	}
	for _, v := range victims {
		if t.Logf("killed %d times: %s", killed[v], v); killed[v] == 0 {
			t.Errorf("never killed: %s", v)
		}
	}
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

// C21, C24: the same with microVMs.
func TestFleet_R05_C21_C24_ReadersInMicroVMs(t *testing.T) {
	s := useMicroVMs(t)
	s.mountsAnywhere("crust-read")
	s.readersShare("crust-read", microVM)
}

// U04, C24: nothing of a pod with hostUsers: false is root on the node, and in the pod all that it is given belongs to its users.
// containerd asks for a handler's features when it starts, so it starts again after crust-vm was installed.
func TestFleet_U04_C24_UsersOfItsOwnInAMicroVM(t *testing.T) {
	s := useMicroVMs(t)
	onNode(t, "kill -KILL $(cat /run/test/containerd.pid)")
	settled(s)
	s.claim("data", "crust-sandbox", "64Mi", "ReadWriteOncePod")
	s.apply(podText("p", []string{"data:/data"}, microVM, "hostUsers: false"))
	s.until(5*time.Minute, "the pod runs", func() (string, bool) {
		got := s.get("pod/p", ".status.phase")
		return s.get("pod/p", ".status") + s.get("events", ".items[*].message"), got == "Running"
	})
	s.onlyPlaceholder("p", "data")
	const files = "/data/f /bin/busybox /etc/hosts /etc/resolv.conf /dev/termination-log"
	if got := s.run("p", "echo kept >/data/f; sync; id -u; stat -c %u "+files); got != "0\n0\n0\n0\n0\n0" {
		t.Errorf("users in the pod: %q", got)
	}
	if got := onNode(t, "stat -c %u /proc/$(pgrep -n -x virtiofsd)/ns"); len(got) < len("65536") {
		t.Errorf("its virtiofsd runs as %s of the node", got)
	}
	s.delete("p")
}
