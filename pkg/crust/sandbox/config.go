package sandbox

import (
	"log/slog"
	"time"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// Config of a Manager. StateDir, KubeletDir and Backend are required.
type Config struct {
	StateDir string
	// KubeletDir is the directory above every target. The kubelet records the driver of each volume there.
	KubeletDir string
	Backend    Backend
	Devices    Devices
	Log        *slog.Logger // nil: no log
	// Timeout bounds every call to a sandbox, so that one that hangs does not block its callers. 0
	// is a minute.
	Timeout time.Duration
	// OwnershipTimeout bounds a publish that gives a volume's files to a group. 0 is ten minutes.
	OwnershipTimeout time.Duration
}

func (c Config) check() error {
	if c.StateDir == "" || c.KubeletDir == "" || c.Backend == nil {
		return fault.New(fault.Invalid, "a sandbox.Config needs StateDir, KubeletDir and Backend")
	}
	return nil
}
