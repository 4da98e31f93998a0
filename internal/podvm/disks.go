package podvm

import (
	"context"
	"encoding/json"
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
			return fault.New(fault.State, "another container of the pod has %s read-only, and a guest has a device in one way only: "+
				"let the pod name its claim once", have.Path)
		}
		return nil
	}
	path, err := hostPath(v.GetMajor(), v.GetMinor())
	if err != nil {
		return err
	}
	disk := &rawDisk{Disk: qmp.Disk{Name: name, Path: path, Major: v.GetMajor(), Minor: v.GetMinor(), Shared: true}}
	disk.ReadOnly = v.GetReadOnly()
	if disk.size, err = hostSize(disk.Disk); err != nil {
		return err
	}
	q, err := d.client(ctx)
	if err != nil {
		return err
	}
	if err := q.Plug(ctx, disk.Disk); err != nil {
		return err
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

// lookTime is how often follow looks at the sizes of devices: nobody tells when one grows.
const lookTime = 2 * time.Second

// follow tells the guest when a device has grown, until ctx ends.
func (d *disks) follow(ctx context.Context, say func(...any)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookTime):
		}
		if err := d.grow(ctx); err != nil && ctx.Err() == nil {
			say("a raw block volume that grew:", err)
		}
	}
}

func (d *disks) grow(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, disk := range d.have {
		size, err := hostSize(disk.Disk)
		if err != nil {
			return err
		}
		if size <= disk.size {
			continue
		}
		q, err := d.client(ctx)
		if err != nil {
			return err
		}
		if err := q.Resize(ctx, disk.Name, size); err != nil {
			return fmt.Errorf("%s: %w", disk.Path, err)
		}
		disk.size = size
	}
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
	b, err := linux.ReadSmall(fmt.Sprintf("/sys/dev/block/%d:%d/size", d.Major, d.Minor))
	if err != nil {
		return 0, err
	}
	const sector = 512 // whatever the device's is
	n, err := strconv.ParseInt(strings.TrimSpace(b), 10, 64)
	return n * sector, err
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
