package podvm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// configFile is a pod's copy of this program's configuration.
const configFile = "oci.json"

// maker is the part of a pod's record that MadeBy reads. Later versions must keep it: an older program reads it to hand a call over to
// them.
type maker struct {
	Program string `json:"program"`
}

// MadeBy returns the program that made a pod, and that program's configuration. id is the pod's, or that of one of its containers. An
// upgrade replaces this program while pods run, and only the program that started a pod's monitor, stubs and guest certainly understands
// them. The result is "" if this program made the pod, if that program no longer exists, or if there is no such pod.
func (p Pods) MadeBy(id string) (program, config string, err error) {
	if !idPattern.MatchString(id) {
		return "", "", nil // for example, of a command that names no container
	}
	pod, err := p.holder(id)
	if err != nil {
		return "", "", err
	}
	if pod == "" {
		pod = id
	}
	dir := filepath.Join(p.Dir, pod)
	var by maker
	err = readJSON(filepath.Join(dir, "pod.json"), &by)
	if errors.Is(err, os.ErrNotExist) || err == nil && by.Program == "" {
		return "", "", nil
	}
	if err != nil {
		return "", "", err
	}
	its, err := os.Stat(by.Program)
	if errors.Is(err, os.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("the program that made pod %s: %w", pod, err)
	}
	this, err := os.Stat("/proc/self/exe")
	if err != nil || os.SameFile(its, this) {
		return "", "", err
	}
	return by.Program, filepath.Join(dir, configFile), nil
}
