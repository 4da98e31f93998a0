package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/podvm"
	"github.com/crust-csi/crust-csi/pkg/crust"
)

// microVM configures pods in microVMs.
type microVM struct {
	Endpoint string `json:"endpoint"` // CRUST_ENDPOINT; of the crustd for microVMs
	Kernel   string `json:"kernel"`
	Initrd   string `json:"initrd"`
	Dir      string `json:"dir"`    // of the pods that run
	Memory   int64  `json:"memory"` // MiB of a guest whose pod has no limit
	Accel    string `json:"accel"`  // kvm, tcg or auto
}

var defaultMicroVM = microVM{
	Endpoint: "unix:///run/crust/vm/crust.sock",
	Kernel:   "/opt/crust/guest/vmlinuz", Initrd: "/opt/crust/guest/pod-initramfs", Dir: "/run/crust/pods", Memory: 512,
}

// inside runs this program as a pod's monitor, its virtiofsd or a container's stub, which are no runtimes.
func inside(args []string) {
	if len(args) < 2 {
		return
	}
	switch args[1] {
	case podvm.StubCommand:
		os.Exit(podvm.Stub(context.Background()))
	case podvm.MonitorCommand:
		if err := podvm.MonitorMain(strings.Join(args[2:], " ")); err != nil {
			os.Exit(1) // it has been said, and is in the pod's log
		}
		os.Exit(0)
	case podvm.FilesCommand:
		fmt.Fprintln(os.Stderr, "crust-oci: virtiofsd:", podvm.FilesMain(args[2:]))
		os.Exit(1)
	}
}

// microVM handles the commands that concern pods in microVMs. If it returns false, the host's runtime does the command.
func (c config) microVM(args []string, command, bundle string) (done bool, err error) {
	runtime.LockOSThread() // what this thread starts ends with it
	client, err := crust.Dial(c.MicroVM.Endpoint)
	if err != nil {
		return false, err
	}
	defer client.Close()
	r := podvm.Runtime{
		Host: c.Runtime, Pods: podvm.Pods{Dir: c.MicroVM.Dir}, Server: client, Endpoint: c.MicroVM.Endpoint, Config: c.file,
		Kernel: c.MicroVM.Kernel, Initrd: c.MicroVM.Initrd, Memory: c.MicroVM.Memory << 20, Accel: c.MicroVM.Accel,
		Resolve: func(ctx context.Context, sandbox, source string) (string, error) {
			r, err := resolve(ctx, client, sandbox, source)
			if err != nil || r.GetForeign() {
				return "", err
			}
			return r.GetPath(), nil
		},
	}
	ctx := context.Background()
	call := podvm.Call{Args: args, Command: command, ID: last(args), Process: option(args, "--process", "-p"), Root: option(args, "--root")}
	names := []string{call.ID} // of pods or containers that the command may be about
	switch command {
	case "run", "restore":
		return false, fmt.Errorf("%s is not supported for microVMs: use create and start", command)
	case "create":
		return c.create(ctx, r, call, bundle)
	case "kill":
		names = args[max(0, len(args)-2):] // the signal comes last, if there is one
	}
	for _, name := range names {
		if err == nil {
			err = handOver(r.Pods, name)
		}
	}
	if err == nil && command != "kill" {
		done, err = r.Do(ctx, call)
	}
	if err != nil && command == "delete" {
		err = notDeleted{err}
	}
	return done, err
}

// create makes a pod, or a container of one.
func (c config) create(ctx context.Context, r podvm.Runtime, call podvm.Call, bundle string) (done bool, err error) {
	file := filepath.Join(bundle, "config.json")
	s, err := readSpec(file)
	if err != nil {
		return false, err
	}
	id, isSandbox, err := s.sandbox()
	switch {
	case err != nil:
		return false, err
	case id == "":
		return false, errors.New("the container has no annotation that names its pod: only containers of pods run in microVMs")
	case !isSandbox:
		if err := handOver(r.Pods, id); err != nil {
			return false, err
		}
		return true, r.CreateContainer(ctx, s.doc, file, id, call)
	case id != call.ID:
		return false, fmt.Errorf("pod %s has another container, %s, as its own", id, call.ID)
	}
	return true, r.CreatePod(ctx, s.doc, call)
}

// handOver replaces this process with the program that made the pod, which then does the call. It returns nil if this program made the pod,
// if that program no longer exists, or if there is no such pod. name is a pod's or a container's.
func handOver(pods podvm.Pods, name string) error {
	program, file, err := pods.MadeBy(name)
	if err != nil || program == "" {
		return err
	}
	if err := os.Setenv(configVariable, file); err != nil {
		return err
	}
	return fmt.Errorf("%s, which made the pod: %w", program, linux.Exec(program, os.Args, os.Environ()))
}

// notDeleted is an error without the words that containerd's shim takes for "it is deleted", wherever they come from.
type notDeleted struct{ error }

func (e notDeleted) Error() string {
	return strings.ReplaceAll(e.error.Error(), "does not exist", "is not there")
}
func (e notDeleted) Unwrap() error { return e.error }

// last is the last argument, which is the container's id in all commands that concern microVMs.
func last(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[len(args)-1]
}

// option returns the value of an option that has either name.
func option(args []string, names ...string) string {
	for i, a := range args {
		for _, n := range names {
			if v, ok := strings.CutPrefix(a, n+"="); ok {
				return v
			}
			if a == n && i+1 < len(args) {
				return args[i+1]
			}
		}
	}
	return ""
}
