package mounter

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// UsedBy returns the lines of Holders and what else uses the device or a part of it: devices on
// top of it, swap, and processes that have it open. It returns at most ten lines. It says nothing of what it cannot look at.
func UsedBy(d Device) []string {
	who := Holders(d)
	name, err := sysName(d)
	if err != nil {
		return who
	}
	nodes := []string{d.Path, "/dev/" + name}
	dir := fmt.Sprintf("/sys/dev/block/%d:%d/", d.Major, d.Minor)
	tops, _ := filepath.Glob(dir + "holders/*")
	parts, _ := filepath.Glob(dir + "*/partition")
	for _, p := range parts {
		p = filepath.Dir(p)
		part := Device{Path: "/dev/" + filepath.Base(p)}
		nodes = append(nodes, part.Path)
		if b, err := os.ReadFile(p + "/dev"); err == nil {
			_, _ = fmt.Sscanf(string(b), "%d:%d", &part.Major, &part.Minor) // on failure 0:0, which nobody holds
		}
		for _, at := range Holders(part) {
			who = append(who, part.Path+" "+at)
		}
		more, _ := filepath.Glob(p + "/holders/*")
		tops = append(tops, more...)
	}
	for _, top := range tops {
		line := filepath.Base(top) + " lies on it"
		if b, err := os.ReadFile(top + "/dm/name"); err == nil {
			line += " (" + strings.TrimSpace(string(b)) + ")"
		}
		who = append(who, line)
	}
	swaps, _ := os.ReadFile("/proc/swaps")
	for line := range strings.Lines(string(swaps)) {
		if f := strings.Fields(line); len(f) > 0 && slices.Contains(nodes, f[0]) {
			who = append(who, f[0]+" is swap space")
		}
	}
	who = append(who, openedBy(d, nodes)...)
	const most = 10
	return who[:min(len(who), most)]
}

// openedBy names the other processes that have one of the nodes open.
func openedBy(d Device, nodes []string) []string {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	var who []string
	for _, p := range procs {
		if filepath.Base(p) == strconv.Itoa(os.Getpid()) {
			continue
		}
		fds, _ := filepath.Glob(p + "/fd/*")
		for _, fd := range fds {
			to, err := os.Readlink(fd)
			if err != nil || !strings.HasPrefix(to, "/") {
				continue
			}
			st, err := linux.StatxPath(fd) // a program in a jail has a node of its own
			if slices.Contains(nodes, to) || err == nil && st.IsBlock() && (Device{Major: st.RdevMajor, Minor: st.RdevMinor}).Same(d) {
				comm, _ := os.ReadFile(p + "/comm")
				who = append(who, fmt.Sprintf("process %s (%s) has %s open", filepath.Base(p), strings.TrimSpace(string(comm)), to))
				break
			}
		}
	}
	return who
}
