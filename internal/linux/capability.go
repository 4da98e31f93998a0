package linux

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// capabilities holds the names of capabilities(7), without CAP_, in numerical order.
var capabilities = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
	NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
	SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG
	WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

// CapabilityNumber returns the number of a capability, given its name without CAP_; false if the
// name does not exist.
func CapabilityNumber(name string) (int, bool) {
	for i, n := range capabilities {
		if n == name {
			return i, true
		}
	}
	return 0, false
}

// CapabilitiesOf reads a capability set (CapEff or CapBnd) from a process's status file
// (/proc/PID/status, proc(5)), one bit per capability.
func CapabilitiesOf(statusFile, set string) (uint64, error) {
	f, err := os.Open(statusFile)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if value, ok := strings.CutPrefix(s.Text(), set+":"); ok {
			return strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", statusFile, set)
}

// DropBounding removes a capability permanently from this thread's bounding set, prctl(2)
// PR_CAPBSET_DROP: no program that the thread executes can have it. EPERM without CAP_SETPCAP.
func DropBounding(number int) error {
	return call("prctl(PR_CAPBSET_DROP)", func() error { return unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0) })
}
