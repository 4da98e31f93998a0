package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/qmp"
	"github.com/crust-csi/crust-csi/pkg/crust/sandbox"
	"github.com/crust-csi/crust-csi/pkg/fault"
)

// attached tells whether QEMU has the disk.
func attached(ctx context.Context, q *qmp.Client, serial string) (bool, error) {
	var list []struct {
		Name string `json:"name"`
	}
	if err := q.Run(ctx, "qom-list", map[string]any{"path": "/machine/peripheral"}, &list); err != nil {
		return false, err
	}
	for _, d := range list {
		if d.Name == serial {
			return true, nil
		}
	}
	return false, nil
}

// refusedWith identifies a refusal of QEMU by its text; QEMU has no codes for them.
func refusedWith(err error, words string) bool {
	var e *qmp.Error
	return errors.As(err, &e) && strings.Contains(e.Desc, words)
}

func attach(ctx context.Context, q *qmp.Client, v sandbox.Volume) error {
	serial := v.Serial()
	disk, err := attached(ctx, q, serial)
	if err != nil || disk {
		return err
	}
	// An interrupted call may have left a node, or one of another device that had this name before.
	if err := removeNode(ctx, q, serial); err != nil {
		return err
	}
	if err := addNode(ctx, q, v); err != nil {
		return err
	}
	return q.Run(ctx, "device_add", map[string]any{"driver": "scsi-hd", "id": serial, "drive": serial, "bus": Bus, "serial": serial}, nil)
}

// addNode opens the device and passes the descriptor to QEMU, which needs no right to open it and
// cannot be led to another. The open is exclusive: while QEMU has the descriptor, the kernel lets
// nobody on this host mount the device or open it so, even after this process ends (C19).
func addNode(ctx context.Context, q *qmp.Client, v sandbox.Volume) error {
	mode := os.O_RDWR | linux.OExcl
	if v.ReadOnly || v.Device.ReadOnly {
		// Exclusively too: reading while somebody else writes returns garbage.
		mode = os.O_RDONLY | linux.OExcl
	}
	f, err := linux.Open(v.Device.Path, mode)
	if errors.Is(err, linux.EBUSY) {
		return fault.New(fault.State, "%s is in use on the host: mounted, or claimed for another sandbox", v.Device.Path)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := linux.StatxFile(f)
	if err != nil {
		return err
	}
	if !st.IsBlock() || st.RdevMajor != v.Device.Major || st.RdevMinor != v.Device.Minor {
		return fault.New(fault.State, "%s is no longer the block device %d:%d", v.Device.Path, v.Device.Major, v.Device.Minor)
	}
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := q.RunWithFile(ctx, "add-fd", map[string]any{"opaque": v.Serial()}, &set, f); err != nil {
		return err
	}
	return q.Run(ctx, "blockdev-add", map[string]any{
		"driver": "host_device", "node-name": v.Serial(), "filename": fmt.Sprintf("/dev/fdset/%d", set.ID),
		"read-only": v.ReadOnly || v.Device.ReadOnly, "discard": "unmap", "cache": map[string]any{"direct": true},
	}, nil)
}

// removeNode removes what QEMU has of a volume, except its disk.
func removeNode(ctx context.Context, q *qmp.Client, serial string) error {
	if err := q.Run(ctx, "blockdev-del", map[string]any{"node-name": serial}, nil); err != nil && !refusedWith(err, "Failed to find node") {
		return err
	}
	return removeFiles(ctx, q, serial)
}

// removeFiles closes QEMU's descriptors of a volume.
func removeFiles(ctx context.Context, q *qmp.Client, serial string) error {
	var sets []struct {
		ID  int `json:"fdset-id"`
		FDs []struct {
			FD     int    `json:"fd"`
			Opaque string `json:"opaque"`
		} `json:"fds"`
	}
	if err := q.Run(ctx, "query-fdsets", nil, &sets); err != nil {
		return err
	}
	for _, set := range sets {
		for _, fd := range set.FDs {
			if fd.Opaque != serial {
				continue
			}
			if err := q.Run(ctx, "remove-fd", map[string]any{"fdset-id": set.ID, "fd": fd.FD}, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func detach(ctx context.Context, q *qmp.Client, serial string) error {
	disk, err := attached(ctx, q, serial)
	if err != nil {
		return err
	}
	if disk {
		events, stop := q.Events()
		defer stop()
		if err := q.Run(ctx, "device_del", map[string]any{"id": serial}, nil); err != nil {
			return err
		}
		if err := deleted(ctx, q, events, serial); err != nil {
			return err
		}
	}
	return removeNode(ctx, q, serial)
}

// deleted waits until the guest has released a disk.
func deleted(ctx context.Context, q *qmp.Client, events <-chan qmp.Event, serial string) error {
	again := time.NewTicker(500 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case e := <-events:
			var d struct{ Device string }
			if e.Name == "DEVICE_DELETED" && json.Unmarshal(e.Data, &d) == nil && d.Device == serial {
				return nil
			}
		case <-again.C: // an event may have been lost
			if disk, err := attached(ctx, q, serial); err != nil || !disk {
				return err
			}
		case <-q.Gone():
			return qmp.ErrGone
		case <-ctx.Done():
			return fault.New(fault.State, "the guest does not let go of the disk %s: %w", serial, ctx.Err())
		}
	}
}
