package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/inventory"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// find returns the volume with this id, name or claim (NAMESPACE/NAME). It is an error if several
// match.
func find(all []*inventory.Volume, name string) (*inventory.Volume, error) {
	var found []*inventory.Volume
	var ids []string
	for _, v := range all {
		if v.GetId() == name {
			return v, nil
		}
		if v.GetName() == name || v.GetClaim() == name {
			found, ids = append(found, v), append(ids, v.GetId())
		}
	}
	switch len(found) {
	case 0:
		return nil, unknown(name)
	case 1:
		return found[0], nil
	}
	return nil, fmt.Errorf("%q means several volumes: %s; give the id of one", name, strings.Join(ids, ", "))
}

func unknown(name string) error {
	return status.Errorf(codes.NotFound, "no volume of this node has the id, name or claim %q (crustctl volume list)", name)
}

// whyNot says why the list of volumes has none of this name. The driver knows if it is the id of a volume whose pool is away, or whose
// record cannot be used.
func whyNot(ctx context.Context, c *csiclient.Client, name string) error {
	if _, _, snapshot, ok := volume.ParseID(name); ok && !snapshot {
		_, err := c.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: name})
		if code := status.Code(err); code != codes.OK && code != codes.Unimplemented && code != codes.NotFound {
			return err
		}
	}
	return unknown(name)
}

// idOf is find for callers that need only the id. If the driver has no such list, it returns the
// name as typed.
func idOf(ctx context.Context, c *csiclient.Client, name string) (string, error) {
	all, err := c.Volumes(ctx)
	if status.Code(err) == codes.Unimplemented {
		return name, nil
	}
	if err != nil {
		return "", err
	}
	v, err := find(all, name)
	if status.Code(err) == codes.NotFound {
		return name, nil // the driver interprets it, or reports it as unknown
	}
	if err != nil {
		return "", err
	}
	return v.GetId(), nil
}

// somewhere returns a path where a volume is published. If it is published nowhere, the id comes
// with the error.
func somewhere(ctx context.Context, c *csiclient.Client, name string) (id, path string, err error) {
	all, err := c.Volumes(ctx)
	if err != nil {
		return "", "", err
	}
	v, err := find(all, name)
	if status.Code(err) == codes.NotFound {
		return "", "", whyNot(ctx, c, name)
	}
	if err != nil {
		return "", "", err
	}
	for _, u := range v.GetUses() {
		return v.GetId(), u.GetTarget(), nil
	}
	return v.GetId(), "", status.Errorf(codes.FailedPrecondition,
		"volume %s is published nowhere on this node, so nothing can be asked how full it is", v.GetId())
}
