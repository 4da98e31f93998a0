package mounter

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// BindAt bind-mounts the file or directory that f is open on at dir/name, in the mount
// namespace of this process, and returns that path. Only the caller may use dir.
func BindAt(f *os.File, dir, name string) (string, error) {
	path := filepath.Join(dir, name)
	st, err := linux.StatxFile(f)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	if st.IsDir() {
		err = os.Mkdir(path, 0o700)
	} else {
		var place *os.File
		if place, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600); err == nil {
			err = place.Close()
		}
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	clone, err := linux.OpenTreeClone(f)
	if err != nil {
		return "", fmt.Errorf("bind at %s: %w", path, err)
	}
	defer clone.Close()
	place, err := linux.Openat(linux.CWD, path, linux.OPath|linux.ONofollow, 0)
	if err != nil {
		return "", err
	}
	defer place.Close()
	if now, err := linux.StatxFile(place); err != nil || now.MountRoot && now.Ino == st.Ino && now.DevMajor == st.DevMajor &&
		now.DevMinor == st.DevMinor {
		return path, err // already bound
	}
	return path, linux.MoveMount(clone, place)
}
