package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
)

// udevRule is the name of the rule's file, in deploy/udev and in udevd's directories of rules.
const udevRule = "59-crust.rules"

// initialPIDs is the link /proc/self/ns/pid of the first namespace (PROC_PID_INIT_INO, since Linux 3.8).
const initialPIDs = "pid:[4026531836]"

// hiddenUdevd returns why a udevd may run whose directory /run/udev this process does not see, as in a container.
func hiddenUdevd(root string) string {
	names, err := filepath.Glob(root + "/proc/[0-9]*/comm")
	if err != nil {
		return err.Error()
	}
	for _, name := range names {
		if comm, err := os.ReadFile(name); err == nil && strings.Contains(string(comm), "udevd") { // one that ends is no daemon
			return "a udevd runs, and its files are not here"
		}
	}
	if inContainer(root) {
		return "this is a container, and a udevd may run outside of it"
	}
	return ""
}

// onNode is what to do about what a container does not see.
const onNode = "run crustctl doctor as root on the node itself (with CRUST: /opt/crust/bin/crustctl)"

// inContainer tells whether this process may be in a container.
func inContainer(root string) bool {
	pids, err := os.Readlink(root + "/proc/self/ns/pid")
	return err != nil || pids != initialPIDs
}

// udevd tells whether the node's udevd reads volumes (docs/crust.md). root is the root of the file system. udevd's notes about the
// devices of volumes decide; the rule's file does where no volume is attached.
func udevd(root string) finding {
	f := finding{What: "udevd leaves volumes alone", Answer: "yes"}
	if _, err := os.Stat(root + "/run/udev/control"); errors.Is(err, os.ErrNotExist) {
		f.Answer = "yes: no udevd runs here"
		if why := hiddenUdevd(root); why != "" {
			f.Answer, f.Do = "cannot tell: "+why, onNode
		}
		return f
	} else if err != nil {
		f.Answer, f.Do = "cannot tell: "+err.Error(), onNode
		return f
	}
	const remedy = "only if guests or pods on this node may be hostile: install deploy/udev/" + udevRule + " (docs/crust.md)"
	backing, err := filepath.Glob(root + "/sys/block/loop*/loop/backing_file")
	if err != nil {
		f.Answer, f.Do = "cannot tell: "+err.Error(), onNode
		return f
	}
	noted := false
	for _, file := range backing {
		shown, err := os.ReadFile(file)
		path := strings.TrimSpace(string(shown))
		image, _ := filepath.Match("v*.img", filepath.Base(path))
		if err != nil || !image || filepath.Base(filepath.Dir(path)) != "volumes" {
			continue
		}
		device := filepath.Dir(filepath.Dir(file))
		numbers, err := os.ReadFile(device + "/dev")
		if err != nil {
			continue // it was detached just now
		}
		notes, err := os.ReadFile(root + "/run/udev/data/b" + strings.TrimSpace(string(numbers)))
		if errors.Is(err, os.ErrNotExist) {
			continue // udevd has not seen it yet
		}
		if err != nil {
			f.Answer, f.Do = "cannot tell: "+err.Error(), onNode
			return f
		}
		if noted = strings.Contains(string(notes), "\nE:CRUST=1\n"); !noted {
			f.Answer, f.Do = "no: it has looked at /dev/"+filepath.Base(device)+", over "+path, remedy
			return f
		}
	}
	if noted {
		return f
	}
	for _, dir := range []string{"/etc", "/run", "/usr/lib", "/lib"} {
		if _, err := os.Stat(root + dir + "/udev/rules.d/" + udevRule); err == nil {
			return f
		}
	}
	f.Answer, f.Do = "no: it has no rule "+udevRule, remedy
	return f
}
