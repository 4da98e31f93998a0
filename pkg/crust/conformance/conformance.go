// Package conformance checks a CRUST server that runs, over its socket: what it answers, with which codes, and whether the host's devices
// are held and free when they have to be. It needs root, for it makes loop devices, and it uses no device that it did not make.
//
// The package sees what an orchestrator sees. What containers see is checked by crusttest.TestBackend, which a backend's own tests run.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
)

// Client calls the server. SandboxManagement may be unimplemented, as in a runtime that has only KEP-2857's service.
type Client interface {
	crustv1alpha1.RuntimeAssistedStorageManagementClient
	crustv1alpha1.SandboxManagementClient
}

// Config says what to check. Client, Sandbox and KubeletDir are required.
type Config struct {
	Client Client
	// Sandbox is the id of a sandbox that runs. Volumes are published to it and taken out again.
	Sandbox string
	// Other is the id of a second one; empty if there is none.
	Other string
	// KubeletDir is the server's. The targets of the volumes are below its directory pods.
	KubeletDir string
	// Driver is the CSI driver whose volumes these pretend to be. The server must allow it loop devices.
	Driver string
	// Scratch is a directory for sparse files, which become loop devices.
	Scratch string
}

// Outcome is what became of a check.
type Outcome string

// Outcomes.
const (
	Passed     Outcome = "passed"
	Failed     Outcome = "failed"
	NotChecked Outcome = "not checked" // the server says that it does not do it, or there is nothing to check it with
)

// Result is the outcome of a check.
type Result struct {
	Check   string  `json:"check"`
	Outcome Outcome `json:"outcome"`
	Detail  string  `json:"detail,omitempty"` // what is wrong, or why it was not checked
}

// run is a run of all checks.
type run struct {
	Config
	capabilities []crustv1alpha1.RuntimeCapability_RPC_Type
	mounts       []string // file systems
	grows        []string
	fs           string // one that can be made here and mounted there
	made         int    // disks
	results      []Result
	left         error // of cleaning up
}

// notChecked is why a check could not be made.
type notChecked string

func (n notChecked) Error() string { return string(n) }

// Run runs all checks, one after the other. The error is about the run itself: the server cannot be reached, a sandbox does not exist, or
// something could not be cleaned up.
func Run(ctx context.Context, c Config) ([]Result, error) {
	r := &run{Config: c}
	if err := r.reach(ctx); err != nil {
		return nil, err
	}
	for _, check := range []struct {
		name string
		do   func(*run, context.Context) error
	}{
		{"capabilities are known, and each is there once", (*run).checkCapabilities},
		{"file systems have names, and those that grow are among them", (*run).checkFileSystems},
		{"arguments that are missing or wrong are INVALID_ARGUMENT", (*run).checkArguments},
		{"an unknown sandbox is NOT_FOUND", (*run).checkUnknownSandbox},
		{"an unknown file system is INVALID_ARGUMENT, and the device stays free", (*run).checkUnknownFileSystem},
		{"a blank device is not mounted, and stays free", (*run).checkBlank},
		{"a device that somebody else uses is FAILED_PRECONDITION, and the call leaves nothing", (*run).checkInUse},
		{"a published volume holds its device, and can be published again", (*run).checkPublish},
		{"a published device at another target is ALREADY_EXISTS", (*run).checkOtherTarget},
		{"a published device in another sandbox is FAILED_PRECONDITION", (*run).checkOtherSandbox},
		{"statistics are of the volume; of another they are NOT_FOUND", (*run).checkStats},
		{"a volume grows with its device, and not beyond: OUT_OF_RANGE", (*run).checkGrowth},
		{"a read-only volume does not grow: FAILED_PRECONDITION", (*run).checkReadOnly},
		{"a volume is published with a group", (*run).checkGroup},
		{"mount sources resolve into volumes, and others are foreign", (*run).checkResolve},
		{"slots show a volume, and do not hold it", (*run).checkSlots},
		{"volumes are listed", (*run).checkList},
		{"an unpublished volume frees its device, and can be unpublished again", (*run).checkUnpublish},
	} {
		result := Result{Check: check.name, Outcome: Passed}
		err := check.do(r, ctx)
		var not notChecked
		switch {
		case errors.As(err, &not):
			result.Outcome, result.Detail = NotChecked, not.Error()
		case err != nil:
			result.Outcome, result.Detail = Failed, err.Error()
		}
		r.results = append(r.results, result)
		if err := ctx.Err(); err != nil {
			return r.results, errors.Join(err, r.left)
		}
	}
	return r.results, r.left
}

// reach finds the sandboxes. A server without ListSandboxes is believed to have them.
func (r *run) reach(ctx context.Context) error {
	if r.Client == nil || r.Sandbox == "" || r.KubeletDir == "" {
		return errors.New("a conformance.Config needs Client, Sandbox and KubeletDir")
	}
	list, err := r.Client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	if err != nil {
		return err
	}
	for _, id := range []string{r.Sandbox, r.Other} {
		is := func(s *crustv1alpha1.Sandbox) bool { return s.GetSandboxId() == id }
		if id != "" && !slices.ContainsFunc(list.GetSandboxes(), is) {
			return fmt.Errorf("the server has no sandbox %q; nothing was checked", id)
		}
	}
	return nil
}

// code expects an error of one of these codes.
func code(what string, err error, wanted ...codes.Code) error {
	if got := status.Code(err); !slices.Contains(wanted, got) {
		return fmt.Errorf("%s: %s (%s), and not %v", what, got, status.Convert(err).Message(), wanted)
	}
	return nil
}

func (r *run) supports(c crustv1alpha1.RuntimeCapability_RPC_Type) bool {
	return slices.Contains(r.capabilities, c)
}

// needs returns why a check of a capability is not made; nil if it is.
func (r *run) needs(list ...crustv1alpha1.RuntimeCapability_RPC_Type) error {
	for _, c := range list {
		if !r.supports(c) {
			return notChecked(fmt.Sprintf("the server does not have the capability %s", c))
		}
	}
	return nil
}
