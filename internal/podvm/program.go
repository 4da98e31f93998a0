package podvm

import (
	"errors"
	"fmt"
	"os"
)

// configFile is a pod's copy of this program's configuration.
const configFile = "oci.json"

// MadeBy returns the program that made a pod, and the configuration that it had, if that is another program than this one. The pod is
// named by its id, or by that of a container of it. An upgrade replaces this program while pods run, and a pod's monitor, stubs and guest
// are sure to understand the program that started them. The result is "" if this program made the pod, if that one is not there any more,
// and if there is no such pod.
func (p Pods) MadeBy(id string) (program, config string, err error) {
	if !idPattern.MatchString(id) {
		return "", "", nil // as of a command that names no container
	}
	pod, err := p.of(id)
	if err == nil && pod == nil {
		pod, err = p.find(id)
	}
	if errors.Is(err, os.ErrNotExist) || err == nil && pod.Program == "" {
		return "", "", nil
	}
	if err != nil {
		return "", "", err
	}
	made, err := os.Stat(pod.Program)
	if errors.Is(err, os.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("the program that made pod %s: %w", pod.ID, err)
	}
	this, err := os.Stat("/proc/self/exe")
	if err != nil || os.SameFile(made, this) {
		return "", "", err
	}
	return pod.Program, pod.at(configFile), nil
}
