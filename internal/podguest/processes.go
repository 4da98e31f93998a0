package podguest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// keeper is the container of the process namespace that the pod's containers share. No other container can have this name.
const keeper = "_processes"

// keeperRoot is its root file system.
const keeperRoot = "/run/crust/keeper"

// kept is the keeper's first process.
type kept struct {
	*process
	ended chan struct{}
}

// processNamespace returns the path of the process namespace that a container is to have, "" for one of its own.
func (s *Server) processNamespace(ctx context.Context, r *guestv1.CreateContainerRequest) (string, error) {
	switch of := r.GetProcessesOf(); {
	case r.GetSharesProcesses():
		return s.sharedProcesses(ctx)
	case of != "":
		s.mu.Lock()
		p := s.containers[of]
		s.mu.Unlock()
		if p == nil || p.found.Signal(linux.Signal(nothing)) != nil {
			return "", fault.New(fault.State, "container %s, whose processes are to be seen, does not run", of)
		}
		return p.namespace(), nil
	}
	return "", nil
}

// sharedProcesses returns the namespace that the pod's containers share. Its first process only waits: for its own child, which sleeps, and
// for those whose parents have ended.
func (s *Server) sharedProcesses(ctx context.Context) (string, error) {
	defer s.locks.Lock(keeper)()
	if s.kept != nil {
		select {
		case <-s.kept.ended: // and all that shared it
			if err := remove(ctx, keeper); err != nil {
				return "", err
			}
			s.kept = nil
		default:
			return s.kept.namespace(), nil
		}
	}
	at := filepath.Join(dir, keeper)
	if err := errors.Join(os.MkdirAll(at, 0o700), os.MkdirAll(filepath.Join(keeperRoot, "proc"), 0o755)); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(keeperRoot, "busybox"), nil, 0o755); err != nil { // a mount point
		return "", err
	}
	config, err := json.Marshal(object{
		"ociVersion": "1.0.2",
		"root":       object{"path": keeperRoot, "readonly": true},
		"process": object{"args": []string{"/busybox", "sh", "-c", "while :; do /busybox sleep 2147483647; done"}, "cwd": "/",
			"user": object{"uid": 65535, "gid": 65535}, "noNewPrivileges": true, "oomScoreAdj": -998},
		"mounts": []any{
			object{"destination": "/proc", "type": "proc", "source": "proc"}, // runc wants it
			object{"destination": "/busybox", "type": "bind", "source": busybox, "options": []string{"bind", "ro", "nosuid", "nodev"}},
		},
		"linux": object{"cgroupsPath": filepath.Join(CgroupsPath, keeper), "namespaces": []any{
			object{"type": "mount"}, object{"type": "pid"}, object{"type": "network"}, object{"type": "ipc"}, object{"type": "uts"},
		}, "resources": object{"devices": []any{object{"allow": false, "access": "rwm"}}}},
	})
	if err != nil {
		return "", err
	}
	p, err := newProcess(keeper, at, config)
	if err == nil {
		if err = p.make(ctx, "create", "--bundle", at); err == nil {
			err = p.start(ctx)
		}
		p.close()
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("the processes that the pod's containers share: %w", err), remove(ctx, keeper))
	}
	s.kept = &kept{process: p, ended: make(chan struct{})}
	go func(k *kept) {
		k.wait()
		close(k.ended)
	}(s.kept)
	return p.namespace(), nil
}

// nothing is the signal that only asks whether a process is there, kill(2).
const nothing = 0

func (p *process) namespace() string { return fmt.Sprintf("/proc/%d/ns/pid", p.found.Pid) }

// join gives a container the process namespace at a path, in its config.json.
func join(config object, path string) {
	all, _ := sub(config, "linux")["namespaces"].([]any)
	for _, n := range all {
		if n, _ := n.(object); n["type"] == "pid" {
			n["path"] = path
		}
	}
}

// killRest kills what a container's first process leaves behind. In a namespace of its own, the kernel does that.
func (p *process) killRest() error {
	return os.WriteFile(filepath.Join(cgroups, p.container, "cgroup.kill"), []byte("1"), 0)
}
