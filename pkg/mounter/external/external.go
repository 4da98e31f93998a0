// Package external mounts file systems whose mount needs an external program, such as cifs
// (mount.cifs). It is a package of its own, because it runs mount(8) through k8s.io/mount-utils. NFS
// needs no program: see mounter.OpenNFS.
package external

import (
	"context"
	"slices"
	"strings"
	"sync"

	mountutils "k8s.io/mount-utils"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// mountUtils is created on first use, because creating it runs a program.
var mountUtils = sync.OnceValue(func() mountutils.Interface { return mountutils.NewWithoutSystemd("") })

// Open mounts the source with mount(8), detached. mount(8) can mount only at a path, so it mounts in
// the directory scratch for a moment. Only the caller may use scratch.
//
// The context is checked before mount(8) starts, not while it runs: interrupting it would leave
// a mount behind.
func Open(ctx context.Context, scratch, source, fstype string, o mounter.Options, readOnly bool) (*mounter.Detached, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return mounter.OpenByPath(scratch, source, fstype, o, readOnly, func(options []string) error {
		linux.Starting()()
		plain, secret := apart(options)
		if err := mountUtils().MountSensitive(source, scratch, fstype, plain, secret); err != nil {
			return fault.New(fault.State, "%s from %s: %w", fstype, source, err)
		}
		return nil
	})
}

// secrets are the options of mount.cifs(8) and others that are secrets themselves.
var secrets = []string{"pass", "password", "password2", "passwd", "pw"}

// apart separates the options whose values must be in no error and no log.
func apart(options []string) (plain, secret []string) {
	for _, o := range options {
		if key, _, _ := strings.Cut(o, "="); slices.Contains(secrets, strings.ToLower(key)) {
			secret = append(secret, o)
		} else {
			plain = append(plain, o)
		}
	}
	return plain, secret
}
