package podvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/podguest"
	"github.com/crust-csi/crust-csi/internal/qmp"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// disks are a pod's raw block volumes, as disks of its guest. A disk stays until the pod ends: a container that is started again has it.
type disks struct {
	socket string // QMP, for the monitor alone; crustd has another

	mu   sync.Mutex
	q    *qmp.Client
	have map[string]*rawDisk // by name
}

type rawDisk struct {
	qmp.Disk
	size int64 // bytes, as the guest knows it
}

// plug plugs in what a container needs and the guest does not have yet.
func (d *disks) plug(ctx context.Context, devices []*guestv1.BlockDevice) error {
	if len(devices) == 0 {
		return nil // and waits for no device of another container
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, v := range devices {
		if err := d.plugOne(ctx, v); err != nil {
			return fmt.Errorf("the raw block volume at %s: %w", v.GetPath(), err)
		}
	}
	return nil
}

func (d *disks) plugOne(ctx context.Context, v *guestv1.BlockDevice) error {
	name := podguest.DiskName(v.GetMajor(), v.GetMinor())
	if have := d.have[name]; have != nil {
		if have.ReadOnly && !v.GetReadOnly() {
			return fault.New(fault.State, "the guest has %s read-only since an earlier container of the pod, and it has a device in one way "+
				"only: let the pod name its claim once", have.Path)
		}
		return nil
	}
	path, err := hostPath(v.GetMajor(), v.GetMinor())
	if err != nil {
		return err
	}
	disk := &rawDisk{Disk: qmp.Disk{Name: name, Path: path, Major: v.GetMajor(), Minor: v.GetMinor(), Shared: true}}
	disk.ReadOnly = v.GetReadOnly()
	if disk.LogicalBlock, disk.PhysicalBlock, err = blockSizes(disk.Disk); err != nil {
		return err
	}
	if disk.size, err = hostSize(disk.Disk); err != nil {
		return err
	}
	q, err := d.client(ctx)
	if err != nil {
		return err
	}
	if err := q.Plug(ctx, disk.Disk); err != nil {
		// The next call begins anew, perhaps for another kind of access.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTime)
		defer cancel()
		return errors.Join(err, q.Unplug(ctx, name))
	}
	d.have[name] = disk
	return nil
}

func (d *disks) client(ctx context.Context) (*qmp.Client, error) {
	if d.q != nil {
		select {
		case <-d.q.Gone():
		default:
			return d.q, nil
		}
	}
	q, err := qmp.Dial(ctx, d.socket)
	if err == nil {
		d.q = q
	}
	return q, err
}

// writeTime is how long the pod's end waits until the guest has written what its containers wrote to raw block volumes.
func (d *disks) writeTime() time.Duration {
	if !d.mu.TryLock() {
		return unmountTime // one is being plugged in
	}
	defer d.mu.Unlock()
	if len(d.have) == 0 {
		return 0
	}
	return unmountTime
}

// lookTime is how often follow looks at the sizes of devices: nobody tells when one grows.
const lookTime = 2 * time.Second

// follow tells the guest when a device has grown, until ctx ends.
func (d *disks) follow(ctx context.Context, say func(...any)) {
	said := map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookTime):
		}
		for _, err := range d.grow(ctx) {
			if text := err.Error(); !said[text] && ctx.Err() == nil {
				said[text] = true
				say("whether a raw block volume grew:", text)
			}
		}
	}
}

func (d *disks) grow(ctx context.Context) (errs []error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, disk := range d.have {
		if err := d.growOne(ctx, disk); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", disk.Path, err))
		}
	}
	return errs
}

func (d *disks) growOne(ctx context.Context, disk *rawDisk) error {
	if disk.ReadOnly {
		return nil // QEMU resizes no read-only disk
	}
	size, err := hostSize(disk.Disk)
	if err != nil || size <= disk.size {
		return err
	}
	q, err := d.client(ctx)
	if err != nil {
		return err
	}
	if err := q.Resize(ctx, disk.Name, size); err != nil {
		return err
	}
	disk.size = size
	return nil
}

// hostPath returns the path of a device of the host.
func hostPath(major, minor uint32) (string, error) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", major, minor))
	if err != nil {
		return "", err
	}
	return "/dev/" + strings.ReplaceAll(filepath.Base(link), "!", "/"), nil // sysfs has no slash in names
}

// hostSize returns the size of a device of the host in bytes.
func hostSize(d qmp.Disk) (int64, error) {
	const sector = 512 // whatever the device's is
	n, err := readNumber(fmt.Sprintf("/sys/dev/block/%d:%d/size", d.Major, d.Minor))
	return n * sector, err
}

// blockSizes returns the sizes of a device's blocks in bytes. A partition has those of its disk.
func blockSizes(d qmp.Disk) (logical, physical int, err error) {
	queue := fmt.Sprintf("/sys/dev/block/%d:%d/queue", d.Major, d.Minor)
	if _, err := os.Stat(queue); errors.Is(err, os.ErrNotExist) {
		queue = fmt.Sprintf("/sys/dev/block/%d:%d/../queue", d.Major, d.Minor)
	}
	l, err := readNumber(queue + "/logical_block_size")
	if err != nil {
		return 0, 0, err
	}
	p, err := readNumber(queue + "/physical_block_size")
	return int(l), int(p), err
}

func readNumber(path string) (int64, error) {
	text, err := linux.ReadSmall(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(text), 10, 64)
}

// blockDevices returns a container's raw block volumes, and an error if it has other devices.
func blockDevices(config object) (devices []*guestv1.BlockDevice, err error) {
	rules := list(sub(sub(config, "linux"), "resources"), "devices")
	for _, d := range list(sub(config, "linux"), "devices") {
		d, _ := d.(object)
		path := text(d, "path")
		if text(d, "type") != "b" {
			return nil, fmt.Errorf("the container has the device %s: pods in microVMs can have raw block volumes, but no other devices, "+
				"and no privileged containers", path)
		}
		v := &guestv1.BlockDevice{Path: path, Mode: 0o660}
		for name, into := range map[string]*uint32{
			"major": &v.Major, "minor": &v.Minor, "fileMode": &v.Mode, "uid": &v.User, "gid": &v.Group,
		} {
			n, ok, err := number(d, name)
			if err != nil {
				return nil, fmt.Errorf("the device %s: %w", path, err)
			}
			if ok {
				*into = n
			}
		}
		may := allowed(rules, v.GetMajor(), v.GetMinor())
		if !strings.Contains(may, "r") {
			return nil, fmt.Errorf("the container has the device %s, which its cgroup must not read", path)
		}
		v.ReadOnly = !strings.Contains(may, "w")
		devices = append(devices, v)
	}
	return devices, nil
}

// number returns a number of a config.json, if it is there.
func number(o object, name string) (n uint32, there bool, err error) {
	v, there := o[name]
	if !there {
		return 0, false, nil
	}
	text, ok := v.(json.Number)
	if !ok {
		return 0, false, fmt.Errorf("%s is no number", name)
	}
	u, err := strconv.ParseUint(text.String(), 10, 32)
	return uint32(u), true, err
}

// allowed returns what a cgroup's rules allow for a block device, of "rwm". A later rule overrides an earlier one; what a rule does not
// name is anything.
func allowed(rules []any, major, minor uint32) string {
	may := map[rune]bool{}
	for _, r := range rules {
		r, _ := r.(object)
		if kind := text(r, "type"); kind != "b" && kind != "a" && kind != "" {
			continue
		}
		if !names(r, "major", major) || !names(r, "minor", minor) {
			continue
		}
		access := text(r, "access")
		if access == "" {
			access = "rwm"
		}
		for _, a := range access {
			may[a] = r["allow"] == true
		}
	}
	got := ""
	for _, a := range "rwm" {
		if may[a] {
			got += string(a)
		}
	}
	return got
}

func names(rule object, part string, n uint32) bool {
	v, there := rule[part]
	if !there {
		return true
	}
	text, _ := v.(json.Number)
	return text.String() == "-1" || text.String() == strconv.FormatUint(uint64(n), 10)
}
