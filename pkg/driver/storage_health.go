package driver

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"

	plaintext "github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume"
)

// mostHealth bounds the text of one health entry, in bytes: the API server refuses a pod's or
// CSINode's status with more than 1024.
const mostHealth = 900

// NodeGetStorageHealth reports what is wrong with this node's pools. Entries of one kind are merged
// and name the pools: CSI wants each status and reason once.
func (d *Driver) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	pools := d.Volumes.Pools()
	found := make([][]mounter.Ailment, len(pools))
	var asked errgroup.Group
	asked.SetLimit(looksAtOnce)
	for i, p := range pools {
		asked.Go(func() (err error) {
			found[i], err = d.poolAilments(ctx, p)
			return err
		})
	}
	if err := asked.Wait(); err != nil {
		return nil, err // the kubelet keeps what it shows
	}
	resp := &csi.NodeGetStorageHealthResponse{}
	for i, ailments := range found {
		for _, a := range ailments {
			status := csi.StorageHealthErrorType_STORAGE_DEGRADED
			if a.Fatal {
				status = csi.StorageHealthErrorType_STORAGE_UNREACHABLE
			}
			text := a.Message
			if of := "pool " + pools[i].Name(); !strings.HasPrefix(text, of+" ") { // most name it themselves
				text = of + ": " + text
			}
			n := slices.IndexFunc(resp.BackendHealth, func(e *csi.NodeGetStorageHealthResponse_StorageBackendHealth) bool {
				return e.GetStatus() == status && e.GetReason() == a.Reason
			})
			if n >= 0 {
				resp.BackendHealth[n].Message += "; " + text
				continue
			}
			resp.BackendHealth = append(resp.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
				Status: status, Reason: a.Reason, Message: text,
			})
		}
	}
	for _, e := range resp.GetBackendHealth() {
		e.Message = plaintext.Text(e.GetMessage(), mostHealth)
	}
	return resp, nil
}

// poolAilments returns what is wrong with a pool. A full pool is not unreachable: what needs no
// space goes on. It returns an error only if the caller has left.
func (d *Driver) poolAilments(ctx context.Context, p volume.Pool) ([]mounter.Ailment, error) {
	found, err := askPool(ctx, d, p, func() ([]mounter.Ailment, error) {
		found := p.Health("")
		if len(found) > 0 {
			return found, nil
		}
		return nil, p.Usable()
	})
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, errNoAnswer), fault.Is(err, fault.Unavailable):
		return []mounter.Ailment{{Reason: doesNotReply, Message: err.Error(), Fatal: true}}, nil
	case err != nil:
		return []mounter.Ailment{{Reason: "PoolUnusable", Message: err.Error(), Fatal: true}}, nil
	}
	for i := range found {
		found[i].Fatal = found[i].Fatal && found[i].Reason != "PoolFull"
	}
	return found, nil
}
