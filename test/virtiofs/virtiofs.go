// Package virtiofs shares a directory of this machine with a guest, by Debian 12's virtiofsd.
package virtiofs

import (
	"net"
	"os"
	"os/exec"

	"github.com/crust-csi/crust-csi/internal/linux"
)

// Serve starts virtiofsd for one guest, whose QEMU connects to socket. It ends with the thread that calls this.
func Serve(share, socket string) (*exec.Cmd, error) {
	l, err := Listen(socket)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	fsd := exec.Command("/usr/lib/qemu/virtiofsd", "--fd=3", "-o", "source="+share, "-o", "sandbox=chroot", "-o", "cache=auto")
	fsd.ExtraFiles, fsd.SysProcAttr = []*os.File{l}, linux.KilledWithThread()
	return fsd, fsd.Start()
}

// Listen returns a socket for a child to accept connections from. A child that makes its own socket gives it the name first, and
// refuses connections until it listens.
func Listen(socket string) (*os.File, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	return l.File()
}
