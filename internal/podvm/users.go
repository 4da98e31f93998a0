package podvm

import (
	"errors"
	"fmt"
	"os"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// users are the host's ids of a pod with hostUsers: false. The guest has no such ids: its own are the pod's. virtiofsd translates, in a
// user namespace that maps them. As root of that namespace it has no rights over files of others.
type users struct {
	UID  uint32 `json:"uid"` // of the host, for 0 in the pod
	GID  uint32 `json:"gid"` // the same
	Size uint32 `json:"size"`
}

// usersOf returns the users of a container, nil if they are those of the host.
func usersOf(config object) (*users, error) {
	if _, ok := namespaces(config)["user"]; !ok {
		return nil, nil
	}
	u, err := mapping(sub(config, "linux"))
	if err != nil {
		return nil, fmt.Errorf("the pod has hostUsers: false: %w", err)
	}
	return u, nil
}

// mapping reads the mappings of ids in a part of a config.json. Kubernetes gives a pod one range, and its ids begin at 0.
func mapping(part object) (*users, error) {
	var u users
	var sizes [2]uint32
	for i, m := range []struct {
		name string
		host *uint32
	}{{"uidMappings", &u.UID}, {"gidMappings", &u.GID}} {
		ranges, begin := list(part, m.name), uint32(0)
		if len(ranges) != 1 {
			return nil, fmt.Errorf("%d ranges in %s: a pod in a microVM needs one", len(ranges), m.name)
		}
		r, _ := ranges[0].(object)
		for name, into := range map[string]*uint32{"containerID": &begin, "hostID": m.host, "size": &sizes[i]} {
			n, _, err := number(r, name)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", m.name, err)
			}
			*into = n
		}
		if begin != 0 || sizes[i] == 0 || sizes[i] != sizes[0] {
			return nil, fmt.Errorf("%s has %d ids from %d on: a pod in a microVM needs as many users as groups, from 0 on", m.name, sizes[i],
				begin)
		}
	}
	u.Size = sizes[0]
	return &u, nil
}

// mapOnto shows the ids of a mount's file system as the pod's: 0 belongs to the pod's root.
func (u users) mapOnto(mount *os.File) error {
	ids := func(host uint32) string { return fmt.Sprintf("0 %d %d", host, u.Size) }
	ns, err := linux.NewUserns(ids(u.UID), ids(u.GID))
	if err != nil {
		return err
	}
	defer ns.Close()
	err = linux.MountSetattr(mount, linux.MountAttr{Set: linux.MountAttrIdmap, Userns: ns}, false)
	if errors.Is(err, linux.EINVAL) {
		return fmt.Errorf("this kernel cannot map the ids of its file system, as hostUsers: false needs: %w", err)
	}
	return err
}

// FilesCommand is the first argument that makes crust-oci the virtiofsd of a pod with users of its own.
const FilesCommand = "pod-files"

// filesAt is where that virtiofsd has what it serves, in its own mount namespace: a directory of every machine.
const filesAt = "/run"

// FilesMain is the process of such a virtiofsd, in its namespaces, until it executes that program. It may not walk the path of the pod's
// directory, which is root's. So it is started in what it serves, and mounts that where it may. It returns only an error.
func FilesMain(args []string) error {
	here, err := linux.Open(".", linux.OPath)
	if err != nil {
		return err
	}
	defer here.Close()
	mount, err := linux.OpenTreeCloneRecursive(here)
	if err != nil {
		return err
	}
	defer mount.Close()
	if err := attach(mount, filesAt); err != nil {
		return err
	}
	return linux.Exec(virtiofsd, append([]string{virtiofsd}, args...), os.Environ())
}
