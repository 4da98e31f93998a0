package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// defaultStateDir is csi-node's default.
const defaultStateDir = "/var/lib/csi-node"

// daemon is the process that serves the driver's socket.
type daemon struct {
	pid  int
	args []string
}

// lookAtDaemon finds the process that serves the socket, and its command line.
func lookAtDaemon(endpoint string) (daemon, error) {
	c, err := net.Dial("unix", strings.TrimPrefix(endpoint, "unix://"))
	if err != nil {
		return daemon{}, err
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return daemon{}, err
	}
	peer, err := linux.PeerOf(raw)
	if err != nil {
		return daemon{}, err
	}
	if peer.PID == 0 {
		return daemon{}, errors.New("the driver's process is not in this pid namespace")
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", peer.PID))
	if err != nil {
		return daemon{}, err
	}
	return daemon{pid: peer.PID, args: strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")}, nil
}

// flags returns the values of a flag, with the syntax of package flag.
func (d daemon) flags(name string) (values []string) {
	for i, a := range d.args {
		if i == 0 {
			continue
		}
		a, dashed := strings.CutPrefix(a, "-")
		a = strings.TrimPrefix(a, "-")
		if value, ok := strings.CutPrefix(a, name+"="); ok && dashed {
			values = append(values, value)
		} else if dashed && a == name && i+1 < len(d.args) {
			values = append(values, d.args[i+1])
		}
	}
	return values
}

// flag returns the last value of a flag, "" if it is not set.
func (d daemon) flag(name string) string {
	if all := d.flags(name); len(all) > 0 {
		return all[len(all)-1]
	}
	return ""
}
