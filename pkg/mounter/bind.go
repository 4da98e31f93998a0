package mounter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// BindAt bind-mounts the file or directory that f is open on at dir/name, in the mount
// namespace of this process, and returns that path. Only the caller may use dir. If another file is
// already bound there (its owner has replaced it since), that bind stays, because a container that
// is being created may have its path. BindAt uses dir/name.1 to dir/name.999 instead; when these are
// used up, the error is fault.State.
func BindAt(f *os.File, dir, name string) (string, error) {
	st, err := linux.StatxFile(f)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	const most = 999
	for n := range most + 1 {
		path := filepath.Join(dir, name)
		if n > 0 {
			path += "." + strconv.Itoa(n)
		}
		if bound, err := bindAt(f, st, path); bound || err != nil {
			return path, err
		}
	}
	return "", fault.New(fault.State, "what was bound at %s was replaced %d times since the volume was published; end the pod",
		filepath.Join(dir, name), most)
}

// bindAt binds at one place. bound is false if something else has the place.
func bindAt(f *os.File, st linux.Statx, path string) (bound bool, err error) {
	if st.IsDir() {
		err = os.Mkdir(path, 0o700)
	} else {
		var place *os.File
		if place, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600); err == nil {
			err = place.Close()
		}
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	place, err := linux.Openat(linux.CWD, path, linux.OPath|linux.ONofollow, 0)
	if err != nil {
		return false, err
	}
	defer place.Close()
	now, err := linux.StatxFile(place)
	if err != nil {
		return false, err
	}
	if now.MountRoot {
		return now.Ino == st.Ino && now.DevMajor == st.DevMajor && now.DevMinor == st.DevMinor, nil
	}
	if now.IsDir() != st.IsDir() {
		return false, nil
	}
	clone, err := linux.OpenTreeClone(f)
	if err != nil {
		return false, fmt.Errorf("bind at %s: %w", path, err)
	}
	defer clone.Close()
	return true, linux.MoveMount(clone, place)
}
