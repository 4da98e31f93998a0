// Package podvm runs pods in microVMs under an unmodified kubelet: a pod's containers run in a guest, by runc, and a small process on the
// host stands for each of them (its stub). The pod's own container, which holds its namespaces, stays on the host.
//
// Three kinds of processes work for a pod. crust-oci does what a call asks for, and exits. The monitor, one per pod, is the parent of the
// pod's QEMU, virtiofsd and passt, and passes on what stubs and crust-oci say to the guest. If any of these programs ends, all of them
// end. A stub is a container of the host's runtime without any rights: its signals, streams and exit status are those of a process in the
// guest.
package podvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Pod is a pod as it was created. It is kept in a directory below /run, for one boot of the machine.
type Pod struct {
	ID       string  `json:"id"`
	UID      uint32  `json:"uid"`   // the user that QEMU runs as; no other pod has it
	Pause    process `json:"pause"` // of the pod's own container
	Monitor  process `json:"monitor"`
	Hostname string  `json:"hostname,omitempty"`
	Memory   int64   `json:"memory"` // the guest's, in bytes
	Kernel   string  `json:"kernel"`
	Initrd   string  `json:"initrd"`
	Accel    string  `json:"accel"`             // kvm or tcg
	Why      string  `json:"why"`               // of tcg, see microvm.Choice
	Server   string  `json:"server"`            // crustd's endpoint
	Program  string  `json:"program,omitempty"` // the program that made the pod, see MadeBy

	Users   *users            `json:"users,omitempty"`
	Sysctls map[string]string `json:"sysctls,omitempty"`
	Cgroups []string          `json:"cgroups,omitempty"` // of its microVM

	dir    string
	config []byte // see configFile
}

// guest is what the monitor records about its running microVM.
type guest struct {
	QEMU    int    `json:"qemu"`
	QMP     string `json:"qmp"`
	Channel string `json:"channel"`
	Magic   []byte `json:"magic"`
}

// Pods is the directory of all pods of a machine.
type Pods struct{ Dir string }

var idPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// firstUser is the first of the users that QEMUs run as, one for each pod. Debian's and other distributions' ranges end below.
const firstUser = 1_900_000_000

// make makes a pod's directories, and chooses the user of its QEMU.
func (p Pods) make(ctx context.Context, pod *Pod) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(p.Dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	within, cancel := context.WithTimeout(ctx, lockTime)
	defer cancel()
	if err := linux.FlockWithin(within, lock); err != nil {
		return fmt.Errorf("other pods are being made: %w", err)
	}
	others, err := p.sweep(ctx)
	if err != nil {
		return err
	}
	taken := map[uint32]bool{}
	for _, o := range others {
		taken[o.UID] = true
	}
	for pod.UID = firstUser; taken[pod.UID]; {
		pod.UID++
	}
	pod.dir = filepath.Join(p.Dir, pod.ID)
	if err := os.Mkdir(pod.dir, 0o700); err != nil {
		return err // it may be there, and run
	}
	if err := pod.lay(); err != nil {
		return errors.Join(err, pod.remove())
	}
	return nil
}

// lay fills a pod's directory. Its last file is pod.json.
func (p *Pod) lay() error {
	for _, d := range []string{"tree", "shared", "containers", "started", "stub", "stub/proc", "stub/dev", "stub/sys"} {
		if err := os.Mkdir(p.at(d), 0o700); err != nil {
			return err
		}
	}
	// Not for others on the host, who cannot come so far, but for the root of the pod's users.
	if err := os.Chmod(p.at("tree"), 0o755); err != nil {
		return err
	}
	for _, f := range []string{"stub/crust-oci", "stub/pod.sock"} {
		if err := linux.MakeFile(p.at(f)); err != nil {
			return err
		}
	}
	if err := p.view(); err != nil {
		return err
	}
	if err := os.WriteFile(p.at(configFile), p.config, 0o600); err != nil {
		return err
	}
	return writeJSON(p.at("pod.json"), p)
}

// sweep returns the pods of this machine, and removes what is left of those that have ended: the call that should have done so was
// interrupted. The caller has the lock under which pods are made.
func (p Pods) sweep(ctx context.Context) (pods []*Pod, err error) {
	names, err := entries(p.Dir)
	if err != nil {
		return nil, err
	}
	within, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	for _, name := range names {
		if st, err := os.Lstat(filepath.Join(p.Dir, name)); err != nil || !st.IsDir() || !idPattern.MatchString(name) {
			continue
		}
		pod, err := p.find(name)
		switch {
		case errors.Is(err, os.ErrNotExist): // it was never made as a whole, or is half removed
		case err != nil && pod.UID == 0:
			return nil, fmt.Errorf("nobody can tell which user pod %s has, and no other pod may have it: %w; drain the node, and remove %s",
				name, err, pod.dir)
		case err != nil: // of another version of this program, perhaps
			fmt.Fprintf(os.Stderr, "crust-oci: pod %s is left alone: %v\n", name, err)
			pods = append(pods, pod)
			continue
		case pod.Pause.runs() || pod.Monitor.runs():
			pods = append(pods, pod)
			continue
		}
		if err := pod.clear(within); err != nil {
			fmt.Fprintf(os.Stderr, "crust-oci: what is left of pod %s: %v\n", name, err)
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// find returns a pod by its id.
func (p Pods) find(id string) (*Pod, error) {
	if !idPattern.MatchString(id) {
		return nil, fmt.Errorf("pod %q: an id has letters, digits, dots, dashes and underscores", id)
	}
	pod := &Pod{dir: filepath.Join(p.Dir, id)}
	return pod, readJSON(pod.at("pod.json"), pod)
}

// of returns the pod that has a container, nil for none.
func (p Pods) of(container string) (*Pod, error) {
	if !idPattern.MatchString(container) {
		return nil, nil
	}
	pod, err := p.holder(container)
	if err != nil || pod == "" {
		return nil, err
	}
	return p.find(pod)
}

// holder returns the id of the pod that has a container, "" for none.
func (p Pods) holder(container string) (string, error) {
	at, err := filepath.Glob(filepath.Join(p.Dir, "*", "containers", container))
	if err != nil || len(at) == 0 {
		return "", err
	}
	return filepath.Base(filepath.Dir(filepath.Dir(at[0]))), nil
}

// add makes what a new container has on the host.
func (p *Pod) add(container string) error {
	file := filepath.Join(p.at("containers"), container)
	if err := linux.MakeFile(file); err != nil {
		return fmt.Errorf("container %s: %w", container, err) // it may be there, and run
	}
	if err := os.Mkdir(filepath.Join(p.at("tree"), container), 0o755); err != nil {
		return errors.Join(err, remove(file))
	}
	return nil
}

// drop removes what a container has on the host.
func (p *Pod) drop(container string) error {
	if err := p.unshare(container); err != nil {
		return err
	}
	return errors.Join(remove(filepath.Join(p.at("started"), container)), remove(filepath.Join(p.at("containers"), container)))
}

func (p *Pod) at(name string) string { return filepath.Join(p.dir, name) }

func (p *Pod) guest() (g guest, err error) { return g, readJSON(p.at("guest.json"), &g) }

func readJSON(path string, into any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber() // in what is of no known type
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func writeJSON(path string, what any) error {
	b, err := json.Marshal(what)
	if err != nil {
		return err
	}
	next := path + ".new"
	if err := os.WriteFile(next, b, 0o600); err != nil {
		return err
	}
	return os.Rename(next, path)
}
