package podguest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-csi/crust-csi/internal/guestdisks"
	"github.com/crust-csi/crust-csi/internal/linux"
	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// DiskName is the serial number of the disk that is a block device of the host. The host's numbers for the device make it unique.
func DiskName(major, minor uint32) string { return fmt.Sprintf(rawPrefix+"%d-%d", major, minor) }

const rawPrefix = "crust-raw-"

// rawDisks returns the names of the disks that are raw block volumes.
func rawDisks() (names []string, err error) {
	all, err := guestdisks.All()
	for name, serial := range all {
		if strings.HasPrefix(serial, rawPrefix) {
			names = append(names, name)
		}
	}
	return names, err
}

// syncRaw writes out what containers wrote to a raw block volume. A process that ends does so, too, but the pod's end may not wait for it.
func syncRaw(name string) error {
	f, err := linux.Open("/dev/"+name, os.O_RDONLY)
	if err == nil {
		err = errors.Join(f.Sync(), f.Close())
	}
	if err != nil {
		return fmt.Errorf("sync %s: %w", name, err)
	}
	return nil
}

// roots has what containers with a read-only root file system see as that, each in a directory of its own.
const roots = "/run/crust/roots"

// object is a part of a config.json.
type object = map[string]any

func sub(o object, name string) object { v, _ := o[name].(object); return v }

// fit makes what a container needs of the guest, and names it in the container's config.json: device files for its raw block volumes,
// and a root file system in which mount points can be made. processes is the path of the process namespace that it joins, if any.
func fit(ctx context.Context, id, dir, processes string, r *guestv1.CreateContainerRequest) ([]byte, error) {
	d := json.NewDecoder(bytes.NewReader(r.GetConfig()))
	d.UseNumber() // limits have more digits than a float64
	var c object
	if err := d.Decode(&c); err != nil {
		return nil, fault.New(fault.Invalid, "config.json: %w", err)
	}
	if err := giveDevices(ctx, dir, c, r.GetBlockDevices()); err != nil {
		return nil, err
	}
	if processes != "" {
		join(c, processes)
	}
	if root := sub(c, "root"); root["readonly"] == true {
		lower, _ := root["path"].(string)
		over, err := overlay(id, lower)
		if err != nil {
			return nil, err
		}
		root["path"] = over
	}
	return json.Marshal(c)
}

// giveDevices makes the device files of a container in its directory, binds them where the container wants them, and lets its cgroup use
// them. runc's own way would make them on the host, if the path is not below /dev.
func giveDevices(ctx context.Context, dir string, c object, devices []*guestv1.BlockDevice) error {
	for i, d := range devices {
		disk, err := guestdisks.Find(ctx, DiskName(d.GetMajor(), d.GetMinor()))
		if err != nil {
			return err
		}
		file := filepath.Join(dir, fmt.Sprintf("device-%d", i))
		if err := linux.Mknod(file, disk.Major, disk.Minor); err != nil {
			return err
		}
		if err := os.Chown(file, int(d.GetUser()), int(d.GetGroup())); err != nil {
			return err
		}
		if err := os.Chmod(file, os.FileMode(d.GetMode()).Perm()); err != nil {
			return err
		}
		mounts, _ := c["mounts"].([]any)
		c["mounts"] = append(mounts, object{"destination": d.GetPath(), "type": "bind", "source": file,
			"options": []string{"bind", "nosuid", "noexec"}})
		access := "rwm"
		if d.GetReadOnly() {
			access = "rm"
		}
		resources := sub(sub(c, "linux"), "resources")
		if resources == nil {
			return fault.New(fault.Invalid, "config.json has no resources, which say what devices a container may use")
		}
		rules, _ := resources["devices"].([]any)
		resources["devices"] = append(rules, object{"allow": true, "type": "b", "major": disk.Major, "minor": disk.Minor, "access": access})
	}
	return nil
}

// overlay lets runc make mount points in a root file system that the host made read-only: on the host, too, it makes them before the
// root is read-only. They are in the guest's memory.
func overlay(id, lower string) (string, error) {
	at := filepath.Join(roots, id)
	if err := os.MkdirAll(at, 0o700); err != nil {
		return "", err
	}
	// The kernel mounts what the host mounted there once somebody opens it, and overlayfs takes nothing that waits for that.
	if _, err := os.ReadDir(lower); err != nil {
		return "", err
	}
	if err := linux.Mount("roots", at, "tmpfs", false, "size=4m,mode=700"); err != nil {
		return "", err
	}
	for _, d := range []string{"upper", "work", "root"} {
		if err := os.Mkdir(filepath.Join(at, d), 0o755); err != nil {
			return "", err
		}
	}
	// The root directory itself is the upper one's.
	st, err := linux.StatxPath(lower)
	if err == nil {
		err = errors.Join(os.Chown(filepath.Join(at, "upper"), int(st.UID), int(st.GID)),
			os.Chmod(filepath.Join(at, "upper"), os.FileMode(st.Mode).Perm()))
	}
	if err != nil {
		return "", err
	}
	root := filepath.Join(at, "root")
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", lower, at, at)
	if err := linux.Mount("root", root, "overlay", false, options); err != nil {
		return "", fmt.Errorf("the read-only root file system of container %s: %w", id, err)
	}
	return root, nil
}

// dropOverlay removes what overlay made. If nothing is there, that is fine.
func dropOverlay(id string) error {
	at := filepath.Join(roots, id)
	for _, path := range []string{filepath.Join(at, "root"), at} {
		if err := linux.Unmount(path); err != nil && !isGone(err) {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	if err := os.Remove(at); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}
