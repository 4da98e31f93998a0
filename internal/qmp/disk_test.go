package qmp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// TestC19_ADeviceThatDoesNotOpenEndsItsCallOnly: a named pipe without a writer stands for a device whose server is gone.
func TestC19_ADeviceThatDoesNotOpenEndsItsCallOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "device")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	d := Disk{Name: "disk", Path: path, ReadOnly: true}
	// A second call does not wait.
	for n, wait := range []time.Duration{100 * time.Millisecond, time.Minute} {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		_, err := d.openIn(ctx)
		cancel()
		waited := errors.Is(err, context.DeadlineExceeded)
		if fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), path) || waited != (n == 0) {
			t.Fatalf("call %d: %v", n+1, err)
		}
	}
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	// It answers again: the abandoned call closes what it got, and the next call tells what is there.
	for {
		if _, err = d.openIn(t.Context()); fault.KindOf(err) != fault.Unavailable {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if fault.KindOf(err) != fault.State || !strings.Contains(err.Error(), "no longer the block device") {
		t.Fatalf("open of a pipe: %v", err)
	}
}

// TestR05_ADescriptorOfAnotherQEMU: a QEMU may be its guest's. What it names as the descriptor of a disk is given to another reader only if
// it is one, of that device and for reading.
func TestR05_ADescriptorOfAnotherQEMU(t *testing.T) {
	dir := t.TempDir()
	var devices []*os.File
	for i, flags := range []int{os.O_RDONLY, os.O_RDWR, os.O_RDONLY} {
		file := filepath.Join(dir, "file"+strconv.Itoa(i))
		if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 1<<20)); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("losetup", "-f", "--show", file).CombinedOutput()
		if err != nil {
			t.Fatalf("%v %s", err, out)
		}
		device := strings.TrimSpace(string(out))
		t.Cleanup(func() { _ = exec.Command("losetup", "-d", device).Run() })
		f, err := linux.Open(device, flags)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		devices = append(devices, f)
	}
	disk := func(f *os.File) Disk {
		st, err := linux.StatxFile(f)
		if err != nil {
			t.Fatal(err)
		}
		return Disk{Name: "disk", Path: f.Name(), Major: st.RdevMajor, Minor: st.RdevMinor, ReadOnly: true}
	}
	for what, c := range map[string]struct {
		names int // the descriptor that QEMU names
		want  Disk
		says  string
	}{
		"its own":      {int(devices[0].Fd()), disk(devices[0]), ""},
		"for writing":  {int(devices[1].Fd()), disk(devices[1]), "open for writing"},
		"another's":    {int(devices[2].Fd()), disk(devices[0]), "no longer the block device"},
		"none":         {1 << 20, disk(devices[0]), "bad file descriptor"},
		"of no number": {-1, disk(devices[0]), "bad file descriptor"},
	} {
		sets := fmt.Sprintf(`{"return": [{"fdset-id": 1, "fds": [{"fd": %d, "opaque": "disk"}, {"fd": 0, "opaque": "other"}]}], "id": 2}`,
			c.names)
		socket, _ := qemu(t, []byte(hello), []byte(sets))
		q, err := Dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		f, err := q.File(t.Context(), os.Getpid(), c.want)
		q.Close()
		if c.says == "" && (err != nil || f == nil) || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v %v", what, f, err)
		}
		if f != nil {
			f.Close()
		}
	}
}
