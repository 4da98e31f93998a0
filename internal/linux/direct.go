package linux

import (
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// DirectAlign is the largest alignment that direct I/O needs, in bytes: the largest logical block
// size of Linux's own devices.
const DirectAlign = 4096

// ODirect bypasses the page cache, open(2).
const ODirect = unix.O_DIRECT

// AlignedBuffer makes a buffer of n bytes that is aligned for direct I/O.
func AlignedBuffer(n int) []byte {
	buf := make([]byte, n+DirectAlign)
	return buf[DirectAlign-int(uintptr(unsafe.Pointer(&buf[0]))%DirectAlign):][:n:n]
}

// Pread is pread(2), repeated until buf is full or the file ends (io.EOF, with the bytes read so
// far).
func Pread(f *os.File, buf []byte, off int64) (int, error) {
	got := 0
	for got < len(buf) {
		var n int
		err := call("pread", func() (e error) { n, e = unix.Pread(fdOf(f), buf[got:], off+int64(got)); return e })
		if err != nil {
			return got, err
		}
		if n == 0 {
			return got, io.EOF
		}
		got += n
	}
	return got, nil
}

// Direct reads a file that is open with O_DIRECT at any offset: it reads unaligned pieces together
// with their surroundings.
type Direct struct{ File *os.File }

// ReadAt is pread(2) of the aligned bytes around [off, off+len(b)). What is aligned already, as an AlignedBuffer is, needs no copy.
func (d Direct) ReadAt(b []byte, off int64) (int, error) {
	if len(b) > 0 && (uint64(off)|uint64(len(b))|uint64(uintptr(unsafe.Pointer(&b[0]))))%DirectAlign == 0 {
		return Pread(d.File, b, off)
	}
	start := off &^ (DirectAlign - 1)
	end := (off + int64(len(b)) + DirectAlign - 1) &^ (DirectAlign - 1)
	buf := AlignedBuffer(int(end - start))
	got, err := Pread(d.File, buf, start)
	if have := int64(got) - (off - start); have < int64(len(b)) {
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		if have <= 0 {
			return 0, err
		}
		return copy(b, buf[off-start:got]), err
	}
	return copy(b, buf[off-start:]), nil
}

// Times are a file's times, in nanoseconds since 1970: its creation (0: its file system does not
// record it) and its last change of any kind.
type Times struct{ Born, Changed int64 }

// FileTimes is statx(2) of the file that f is open on, for its times.
func FileTimes(f *os.File) (Times, error) {
	var st unix.Statx_t
	err := call("statx", func() error {
		return unix.Statx(fdOf(f), "", unix.AT_EMPTY_PATH, unix.STATX_BTIME|unix.STATX_CTIME, &st)
	})
	t := Times{Changed: st.Ctime.Sec*1e9 + int64(st.Ctime.Nsec)}
	if st.Mask&unix.STATX_BTIME != 0 {
		t.Born = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	return t, err
}
