package podvm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/microvm"
)

const kvmDevice = "/dev/kvm"

// accelerator chooses how guests are run, see microvm.Choose. KVM must also be usable by the users that QEMUs run as.
func (r *Runtime) accelerator(ctx context.Context) (accel, why string, err error) {
	ctx, cancel := context.WithTimeout(ctx, bootTime)
	defer cancel()
	c, err := microvm.Choose(ctx, microvm.Config{Kernel: r.Kernel, Initrd: r.Initrd, Accel: r.Accel})
	if err != nil || c.Accel != "kvm" {
		return c.Accel, c.Why, err
	}
	insisted := cmp.Or(r.Accel, os.Getenv(microvm.AccelVariable)) == "kvm"
	switch _, ok, err := kvmGroups(); {
	case err != nil && insisted:
		return "", "", fmt.Errorf("emulation is refused (accel kvm), and there is no KVM here: %w", err)
	case err != nil || !ok && !insisted:
		return "tcg", kvmDevice + " can be used by root only, and QEMU does not run as root: guests are emulated, which is slower; " +
			"give it a group of its own (Debian: kvm)", err
	case !ok:
		return "", "", fmt.Errorf("emulation is refused (accel kvm), and %s can be used by root only, while QEMU does not run as root: "+
			"give it a group of its own (Debian: kvm)", kvmDevice)
	}
	return c.Accel, "", nil
}

// kvmGroups is groupFor of the device.
func kvmGroups() (groups []uint32, ok bool, err error) {
	st, err := os.Stat(kvmDevice)
	if err != nil {
		return nil, false, err
	}
	group, err := linux.GroupOf(kvmDevice)
	if err != nil {
		return nil, false, err
	}
	groups, ok = groupFor(st.Mode(), group)
	return groups, ok, nil
}

// groupFor returns the group that lets an unprivileged user use a device, if one is needed. Root's group opens more than a device.
func groupFor(mode os.FileMode, group uint32) (groups []uint32, ok bool) {
	const others, ofGroup = 0o006, 0o060
	switch {
	case mode&others == others:
		return nil, true
	case mode&ofGroup == ofGroup && group != 0:
		return []uint32{group}, true
	}
	return nil, false
}

// launch starts the pod's monitor in the pod's network namespace and cgroup, and waits until its microVM runs.
func (p *Pod) launch(ctx context.Context) error {
	network, err := linux.Open(fmt.Sprintf("/proc/%d/ns/net", p.Pause.PID), os.O_RDONLY)
	if err != nil {
		return err
	}
	defer network.Close()
	said, says, err := os.Pipe()
	if err != nil {
		return err
	}
	defer said.Close()
	monitor := exec.Command("/proc/self/exe", MonitorCommand, p.dir)
	monitor.ExtraFiles, monitor.SysProcAttr = []*os.File{says}, linux.NewSession()
	may, err := monitor.StdinPipe()
	if err == nil {
		err = linux.InNetwork(network, monitor.Start)
	}
	says.Close()
	if err != nil {
		return err
	}
	give := func(err error) error { return errors.Join(err, monitor.Process.Kill(), monitor.Wait()) }
	// It waits for a word, so that all that it starts is in the pod's cgroup, and known to whoever deletes the pod.
	if err := p.enter(monitor.Process.Pid); err != nil {
		return give(err)
	}
	if p.Monitor, err = processOf(monitor.Process.Pid); err == nil {
		err = writeJSON(p.at("pod.json"), p)
	}
	if err == nil {
		_, err = io.WriteString(may, begin)
	}
	if err != nil {
		return give(err)
	}
	end, ok := ctx.Deadline()
	if !ok {
		end = time.Now().Add(bootTime + 10*time.Second) // the monitor gives up first, and says why
	}
	err = said.SetReadDeadline(end)
	var text []byte
	if err == nil {
		text, err = io.ReadAll(said)
	}
	if err != nil {
		return give(fmt.Errorf("the microVM of pod %s does not start: %w", p.ID, err))
	}
	if rest, ok := bytes.CutPrefix(text, []byte(running)); !ok || len(rest) > 0 {
		return errors.Join(fmt.Errorf("the microVM of pod %s does not start: %s", p.ID, strings.TrimSpace(string(text))), monitor.Wait())
	}
	return nil
}

// begin is the word that a monitor waits for, and running is what it says once its microVM runs; anything else is an error.
const (
	begin   = "begin"
	running = "running"
)

// MonitorMain is the monitor's process: it waits for its word, and says on descriptor 3 how it went. If whoever started it ends before the
// word, it ends, too.
func MonitorMain(dir string) error {
	word := make([]byte, len(begin))
	if _, err := io.ReadFull(os.Stdin, word); err != nil {
		return err
	}
	// What it starts inherits this.
	if err := os.WriteFile("/proc/self/"+scoreFile, []byte(strconv.Itoa(firstScore)), 0o644); err != nil {
		return err
	}
	says := os.NewFile(3, "says")
	told := false
	err := Monitor(dir, func() {
		told = true
		_, _ = io.WriteString(says, running) // nobody waits any more
		says.Close()
	})
	if err != nil && !told {
		_, _ = io.WriteString(says, err.Error()) // the same
	}
	return err
}
