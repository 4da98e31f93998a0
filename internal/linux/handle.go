package linux

import "golang.org/x/sys/unix"

// DirHandle is where a directory was read up to, name_to_handle_at(2). It holds nothing open.
type DirHandle struct {
	file unix.FileHandle
	at   int64
}

// Handle gives what OpenHandle needs. EOPNOTSUPP where the file system has no handles.
func (d Dir) Handle() (DirHandle, error) {
	var h DirHandle
	err := call("name_to_handle_at", func() (e error) { h.file, _, e = unix.NameToHandleAt(d.fd, "", unix.AT_EMPTY_PATH); return e })
	if err == nil {
		err = call("lseek", func() (e error) { h.at, e = unix.Seek(d.fd, 0, unix.SEEK_CUR); return e })
	}
	return h, err
}

// OpenHandle opens a directory again that is on the same mount as d, open_by_handle_at(2), to be read on where it was.
// ESTALE when it was removed. Needs CAP_DAC_READ_SEARCH.
func (d Dir) OpenHandle(h DirHandle) (Dir, error) {
	var fd int
	err := call("open_by_handle_at", func() (e error) {
		fd, e = unix.OpenByHandleAt(d.fd, h.file, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOATIME)
		return e
	})
	if err != nil {
		return Dir{}, err
	}
	err = call("lseek", func() error { _, e := unix.Seek(fd, h.at, unix.SEEK_SET); return e })
	if err != nil {
		_ = unix.Close(fd)
	}
	return Dir{fd}, err
}
