// Command crust-oci is an OCI runtime for containerd and CRI-O. It passes every command to runc or crun, and starts the containers of a
// registered sandbox in the sandbox's mount namespace. They see the volumes that are mounted there and nowhere else.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-csi/crust-csi/internal/linux"
	"github.com/crust-csi/crust-csi/internal/plain"
	"github.com/crust-csi/crust-csi/internal/podvm"
	"github.com/crust-csi/crust-csi/pkg/crust"
	crustv1alpha1 "github.com/crust-csi/crust-csi/pkg/crust/v1alpha1"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// config is /etc/crust/oci.json; environment variables override it.
type config struct {
	Runtime  string  `json:"runtime"`  // CRUST_OCI_RUNTIME; default: runc, or what follows "crust-" in this program's name
	Endpoint string  `json:"endpoint"` // CRUST_ENDPOINT
	Sandbox  string  `json:"-"`        // --sandbox; namespace, or microvm, which is the default of a program called crust-vm
	MicroVM  microVM `json:"microvm"`

	file []byte // all of it, as it was read
}

// configFile is the configuration, unless the environment variable names another.
const (
	configFile     = "/etc/crust/oci.json"
	configVariable = "CRUST_OCI_CONFIG"
)

func main() {
	inside(os.Args)
	failure := run() // it returns only on failure
	err := errors.New(plain.Lines(failure.Error(), 1<<14))
	fmt.Fprintln(os.Stderr, "crust-oci:", err)
	var host *podvm.HostError
	var several interface{ Unwrap() []error }
	if errors.As(failure, &host) && host.Status() > 0 && !errors.As(failure, &several) {
		os.Exit(host.Status()) // its entry is the last one in the log, as its caller expects
	}
	if lerr := logTo(os.Args[1:], err); lerr != nil {
		fmt.Fprintln(os.Stderr, "crust-oci:", lerr)
	}
	os.Exit(1)
}

func load() (config, error) {
	c := config{Runtime: "runc", Endpoint: "unix:///run/crust/crust.sock", Sandbox: "namespace", MicroVM: defaultMicroVM,
		file: []byte("{}")}
	switch name, _ := strings.CutPrefix(filepath.Base(os.Args[0]), "crust-"); name {
	case "vm":
		c.Sandbox = "microvm"
	case "oci", os.Args[0], filepath.Base(os.Args[0]):
	default:
		c.Runtime = name
	}
	file := cmp.Or(os.Getenv(configVariable), configFile)
	b, err := os.ReadFile(file)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		if err = d.Decode(&c); err == nil {
			if _, end := d.Token(); end != io.EOF {
				err = errors.New("more follows after the configuration")
			}
		}
		c.file = b
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("%s: %w", file, err)
	}
	if v := os.Getenv("CRUST_OCI_RUNTIME"); v != "" {
		c.Runtime = v
	}
	if v := os.Getenv("CRUST_ENDPOINT"); v != "" {
		c.Endpoint, c.MicroVM.Endpoint = v, v
	}
	path, err := exec.LookPath(c.Runtime)
	if err != nil {
		return c, fmt.Errorf("every command is passed on to %q, which is not there (%w): install it, or set \"runtime\" in %s",
			c.Runtime, err, file)
	}
	c.Runtime = path
	return c, nil
}

func run() error {
	c, err := load()
	if err != nil {
		return err
	}
	args := os.Args[1:]
	if len(args) > 1 && args[0] == "--sandbox" {
		c.Sandbox, args = args[1], args[2:]
	}
	command, bundle, err := parse(args)
	if err != nil {
		return err
	}
	switch c.Sandbox {
	case "namespace":
	case "microvm":
		done, err := c.microVM(args, command, bundle)
		if err != nil {
			return err
		}
		if done {
			os.Exit(0)
		}
		return linux.Exec(c.Runtime, append([]string{c.Runtime}, args...), os.Environ())
	default:
		return fmt.Errorf("sandbox %q: namespace or microvm", c.Sandbox)
	}
	switch command {
	case "create", "run":
		if err := c.prepare(bundle); err != nil {
			return err
		}
	case "restore":
		// Restore creates a container too, from saved mounts that nobody resolved.
		s, err := readSpec(filepath.Join(bundle, "config.json"))
		if err != nil {
			return err
		}
		if err := s.closed(); err != nil {
			return err
		}
	}
	return linux.Exec(c.Runtime, append([]string{c.Runtime}, args...), os.Environ())
}

// prepare examines a container that is about to be created, and enters its sandbox's mount namespace.
func (c config) prepare(bundle string) error {
	spec, err := readSpec(filepath.Join(bundle, "config.json"))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	id, isSandbox, err := spec.sandbox()
	if err != nil {
		return err
	}
	if id != "" && !isSandbox {
		client, err := crust.Dial(c.Endpoint)
		if err != nil {
			return err
		}
		defer client.Close()
		namespace, err := find(ctx, client, id)
		if err != nil {
			// The sandbox is unknown without the server. Containers that need none of its volumes start; see closed.
			return errors.Join(spec.closed(), ignoreUnreachable(err))
		}
		if namespace != "" {
			return spec.enter(ctx, client, id, namespace)
		}
	}
	return spec.closed()
}

func ignoreUnreachable(err error) error {
	if errors.Is(err, errUnreachable) {
		return nil
	}
	return err
}

var errUnreachable = errors.New("the CRUST server cannot be reached")

// find returns the path of a sandbox's mount namespace, "" if the sandbox is not registered.
func find(ctx context.Context, client *crust.Client, id string) (string, error) {
	list, err := client.ListSandboxes(ctx, &crustv1alpha1.ListSandboxesRequest{})
	if err != nil {
		return "", fmt.Errorf("%w: %w", errUnreachable, err)
	}
	for _, s := range list.GetSandboxes() {
		if s.GetSandboxId() != id {
			continue
		}
		if s.GetMountNamespace() == "" {
			return "", fmt.Errorf("sandbox %s is of kind %s, which has no mount namespace on this kernel to start a container in", id,
				s.GetKind())
		}
		return s.GetMountNamespace(), nil
	}
	return "", nil
}

// spec is a container's config.json. Mount sources are changed, and the propagation of slots.
type spec struct {
	path string
	doc  map[string]any
}

func readSpec(path string) (*spec, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if err := unambiguous(b); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	s := &spec{path: path}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&s.doc); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func (s *spec) annotation(name string) string {
	m, _ := s.doc["annotations"].(map[string]any)
	v, _ := m[name].(string)
	return v
}

// binds calls f with every bind mount and its source, and replaces the source with f's result.
func (s *spec) binds(f func(mount map[string]any, source string) (string, error)) (changed bool, err error) {
	mounts, _ := s.doc["mounts"].([]any)
	for _, m := range mounts {
		m, _ := m.(map[string]any)
		source, _ := m["source"].(string)
		kind, _ := m["type"].(string)
		options, _ := m["options"].([]any)
		if kind != "bind" && !slices.Contains(options, any("bind")) && !slices.Contains(options, any("rbind")) || source == "" {
			continue
		}
		if !filepath.IsAbs(source) {
			// Resolve it as the runtimes do.
			var err error
			if source, err = filepath.Abs(filepath.Join(filepath.Dir(s.path), source)); err != nil {
				return false, err
			}
		}
		next, err := f(m, source)
		if err != nil {
			destination, _ := m["destination"].(string)
			return false, fmt.Errorf("mount at %s: %w", destination, err)
		}
		if next != source {
			m["source"], changed = next, true
		}
	}
	return changed, nil
}

// closed refuses a container whose mounts include a slot, or a deferred volume, that no sandbox has: it would get a directory of the host,
// or the placeholder.
func (s *spec) closed() error {
	_, err := s.binds(func(mount map[string]any, source string) (string, error) {
		if slot, err := podvm.Slot(s.doc, mount, source, ""); slot {
			return "", err
		}
		deferred, err := mounter.IsPlaceholder(source)
		if err == nil && deferred {
			err = fmt.Errorf("%s is of a volume that was deferred to a sandbox, and no sandbox of this container has it; is crustd running, and was the volume published to the sandbox?", source)
		}
		return source, err
	})
	return err
}

// resolve asks the server where a mount's source is in a sandbox. It retries while the server is busy with that volume.
func resolve(ctx context.Context, client *crust.Client, id, source string) (*crustv1alpha1.ResolveMountResponse, error) {
	const pause = 50 * time.Millisecond
	for {
		r, err := client.ResolveMount(ctx, &crustv1alpha1.ResolveMountRequest{SandboxId: id, Source: source})
		if status.Code(err) != codes.Aborted {
			return r, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// enter points the mounts to the sandbox's volumes, and moves this thread, which becomes the runtime, into its mount namespace.
func (s *spec) enter(ctx context.Context, client *crust.Client, id, namespace string) error {
	// Open it before anything is resolved: the path names an open file of the server's, whose descriptor may later belong to another
	// sandbox.
	ns, err := linux.Open(namespace, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer ns.Close()
	if now, err := find(ctx, client, id); err != nil || now != namespace {
		return errors.Join(fmt.Errorf("sandbox %s was deregistered just now", id), err)
	}
	changed, err := s.binds(func(mount map[string]any, source string) (string, error) {
		r, err := resolve(ctx, client, id, source)
		if err != nil {
			return "", err
		}
		slot, err := podvm.Slot(s.doc, mount, source, r.GetPath())
		switch {
		case err != nil || slot:
			return r.GetPath(), err
		case !r.GetForeign():
			return r.GetPath(), nil
		}
		deferred, err := mounter.IsPlaceholder(source)
		if err == nil && deferred {
			err = podvm.NotPublished(source, id)
		}
		return source, err
	})
	if err != nil {
		return err
	}
	if changed {
		if err := s.write(); err != nil {
			return err
		}
	}
	cwd, err := os.Getwd()
	if err != nil {
		return err
	}
	runtime.LockOSThread() // until execve
	if err := linux.EnterMountNamespace(ns); err != nil {
		return fmt.Errorf("mount namespace of sandbox %s: %w", id, err)
	}
	if err := os.Chdir(cwd); err != nil {
		return err
	}
	// Check again, now as the runtime will see it: a volume may have been removed meanwhile.
	return s.closed()
}

func (s *spec) write() error {
	b, err := json.Marshal(s.doc)
	if err != nil {
		return err
	}
	st, err := os.Stat(s.path)
	if err != nil {
		return err
	}
	next := s.path + ".crust"
	if err := os.WriteFile(next, b, st.Mode().Perm()); err != nil {
		return err
	}
	return os.Rename(next, s.path)
}
