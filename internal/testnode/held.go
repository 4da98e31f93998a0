package testnode

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// PatientUnstage repeats a NodeUnstageVolume that is refused because its loop device is in use, while nobody can be found who
// uses it: for a minute at most, as the kubelet does for longer. On a busy machine the kernel takes that long to drop a copy of the
// mount table that some other process made, and until then each file system of that copy is in use. A device that a process has
// open, or that is mounted in any process's namespace, is no such case: then the refusal is the answer.
func PatientUnstage(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := invoke(ctx, method, req, reply, cc, opts...)
		if !strings.HasSuffix(method, "/NodeUnstageVolume") || status.Code(err) != codes.FailedPrecondition || time.Now().After(end) {
			return err
		}
		device := usedDevice.FindStringSubmatch(status.Convert(err).Message())
		if device == nil {
			return err
		}
		holders, looked := Holders(device[1])
		if looked != nil || len(holders) > 0 {
			return err
		}
	}
}

// What else an unstage says of a device, such as lost writes, it may say only once.
var usedDevice = regexp.MustCompile(`(/dev/loop[0-9]+) is (?:in use|still open)`)

// Holders names the processes that have the block device open, and those in whose mount namespace it is mounted.
func Holders(device string) (holders []string, err error) {
	var node syscall.Stat_t
	if err := syscall.Stat(device, &node); err != nil {
		return nil, err
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, process := range processes {
		open, err := has(process, device, node.Rdev)
		// It has ended meanwhile. ESRCH is what proc(5) says of its descriptors, EINVAL of its mounts.
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.EINVAL) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if open != "" {
			holders = append(holders, filepath.Base(process)+" "+open)
		}
	}
	return holders, nil
}

// has says how the process has the device: open, or mounted.
func has(process, device string, number uint64) (how string, err error) {
	fds, err := os.ReadDir(process + "/fd")
	if err != nil {
		return "", err
	}
	for _, fd := range fds {
		if to, err := os.Readlink(process + "/fd/" + fd.Name()); err == nil && to == device { // or it is closed
			return "has it open", nil
		}
	}
	mounts, err := os.ReadFile(process + "/mountinfo")
	if err != nil {
		return "", err
	}
	// A btrfs has a number of its own, so the source counts, too.
	major, minor := number>>8&0xfff, number&0xff|number>>12&^0xff
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		_, rest, _ := strings.Cut(line, " - ")
		if len(fields) > 2 && fields[2] == fmt.Sprintf("%d:%d", major, minor) || strings.Contains(rest, " "+device+" ") {
			return "has it mounted", nil
		}
	}
	return "", nil
}
