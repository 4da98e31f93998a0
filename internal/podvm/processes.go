package podvm

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// processesOf tells whose processes a container sees beside its own, by the path of its process namespace on the host: those of the pod's
// containers (shareProcessNamespace), those of one container (kubectl debug --target), or none.
func (p *Pod) processesOf(path string) (all bool, container string, err error) {
	if path == "" {
		return false, "", nil
	}
	number, ok := strings.CutSuffix(strings.TrimPrefix(path, "/proc/"), "/ns/pid")
	pid, err := strconv.Atoi(number)
	if !ok || err != nil {
		return false, "", fmt.Errorf("the process namespace %s is that of no process", path)
	}
	if pid == p.Pause.PID {
		return true, "", nil
	}
	containers, err := os.ReadDir(p.at("containers"))
	if err != nil {
		return false, "", err
	}
	for _, c := range containers {
		// One that is being made has no stub yet.
		if stub, err := p.stub(c.Name()); err == nil && stub.PID == pid && stub.same() {
			return false, c.Name(), nil
		}
	}
	return false, "", fmt.Errorf("the process namespace %s belongs to no container of pod %s that runs", path, p.ID)
}
