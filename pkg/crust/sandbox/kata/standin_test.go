package kata_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/crust-csi/crust-csi/internal/loopdev"
	"github.com/crust-csi/crust-csi/pkg/crust/engine"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/mounter/ownership"
)

// standIn does what the documents and sources of Kata say of its runtime in Go: it reads the record of each mount source, notes the
// sandbox's id there, gives the device to a machine, and serves the management socket. Its machine is a mount that nobody else sees, of a
// loop device on top of the volume's, because the volume's own is claimed. It is no Kata.
type standIn struct {
	t       *testing.T
	volumes string // the directory of records
	boxes   string // the directory of sandboxes
	rust    bool   // it does not note the sandbox's id, as runtime-rs until 2026 at least
	grows   bool   // as an agent of the future
	answer  string // instead of statistics

	mu     sync.Mutex
	guests map[string]*guest // by sandbox
}

type guest struct {
	process *exec.Cmd
	server  *http.Server
	mounts  map[string]*mounted // by device
}

type mounted struct {
	*mounter.Detached
	loop  loopdev.Device
	loops loopdev.Nodes
	roots []*os.File // that containers have
}

// errShared: Kata found no record, so that the container gets the host's directory.
var errShared = errors.New("the container has the host's directory")

func newStandIn(t *testing.T) *standIn {
	dir := t.TempDir()
	return &standIn{t: t, volumes: filepath.Join(dir, "direct-volumes"), boxes: filepath.Join(dir, "sbs"), guests: map[string]*guest{}}
}

// boot starts a sandbox and returns its pid.
func (k *standIn) boot(id string) int {
	k.t.Helper()
	g := &guest{process: exec.Command("sleep", "1000000"), mounts: map[string]*mounted{}, server: &http.Server{}}
	check(k.t, g.process.Start())
	k.t.Cleanup(func() { k.end(id) })
	check(k.t, os.MkdirAll(filepath.Join(k.boxes, id), 0o755))
	l, err := net.Listen("unix", filepath.Join(k.boxes, id, "shim-monitor.sock"))
	check(k.t, err)
	mux := http.NewServeMux()
	mux.HandleFunc("/direct-volume/stats", func(w http.ResponseWriter, r *http.Request) { k.stats(w, r, g) })
	mux.HandleFunc("/direct-volume/resize", func(w http.ResponseWriter, r *http.Request) { k.resize(w, r, g) })
	g.server.Handler = mux
	go g.server.Serve(l)
	k.mu.Lock()
	k.guests[id] = g
	k.mu.Unlock()
	return g.process.Process.Pid
}

// end ends a sandbox as a crash of its hypervisor does: nothing is unmounted in the guest before its devices are closed.
func (k *standIn) end(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	g := k.guests[id]
	if g == nil {
		return
	}
	delete(k.guests, id)
	for _, m := range g.mounts {
		for _, root := range m.roots {
			check(k.t, root.Close())
		}
		check(k.t, m.Close())
		check(k.t, m.loops.Detach(m.loop))
	}
	g.server.Close()
	check(k.t, g.process.Process.Kill())
	_ = g.process.Wait() // it was killed
}

func (k *standIn) place(target string) string {
	source, err := filepath.EvalSymlinks(target)
	check(k.t, err)
	return filepath.Join(k.volumes, base64.URLEncoding.EncodeToString([]byte(source)))
}

// create creates a container with a mount source. It returns the volume's root as the container sees it.
func (k *standIn) create(id, target string) (root string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	dir := k.place(target)
	b, err := os.ReadFile(filepath.Join(dir, "mountInfo.json"))
	if errors.Is(err, os.ErrNotExist) {
		return target, errShared
	}
	check(k.t, err)
	var info struct {
		VolumeType string            `json:"volume-type"`
		Device     string            `json:"device"`
		FSType     string            `json:"fstype"`
		Metadata   map[string]string `json:"metadata"`
		Options    []string          `json:"options"`
	}
	check(k.t, json.Unmarshal(b, &info))
	if info.VolumeType != "directvol" {
		return "", fmt.Errorf("volume-type %q", info.VolumeType)
	}
	if !k.rust {
		check(k.t, os.WriteFile(filepath.Join(dir, id), nil, 0o600))
	}
	g := k.guests[id]
	m := g.mounts[info.Device]
	if m == nil {
		if m, err = k.mount(info.Device, info.FSType, info.Metadata, info.Options); err != nil {
			return "", err
		}
		g.mounts[info.Device] = m
	}
	d, err := m.Dir()
	check(k.t, err)
	m.roots = append(m.roots, d)
	return fmt.Sprintf("/proc/self/fd/%d", d.Fd()), nil
}

func (k *standIn) mount(device, fs string, metadata map[string]string, options []string) (*mounted, error) {
	m := &mounted{loops: loopdev.Nodes{Dir: k.t.TempDir()}}
	readOnly := slices.Contains(options, "ro")
	var err error
	if m.loop, err = m.loops.Attach(device, readOnly); err != nil {
		return nil, err
	}
	o, err := mounter.ParseOptions(options)
	check(k.t, err)
	r := engine.Request{Device: mounter.Device{Path: m.loop.Path, Major: m.loop.Major, Minor: m.loop.Minor, ReadOnly: readOnly}, Type: fs,
		Options: o, ReadOnly: readOnly, Policy: ownership.Policy(metadata["fsGroupChangePolicy"])}
	if text := metadata["fsGroup"]; text != "" {
		if readOnly {
			return nil, errors.New("chown: read-only file system") // as Kata's agent
		}
		n, err := strconv.ParseUint(text, 10, 32)
		check(k.t, err)
		group := uint32(n)
		r.Group = &group
	}
	if m.Detached, err = engine.Open(k.t.Context(), r); err != nil {
		return nil, errors.Join(err, m.loops.Detach(m.loop))
	}
	return m, nil
}

// find returns the mount that a request is about. The shim knows it by the device.
func (k *standIn) find(g *guest, device string) (*mounted, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m := g.mounts[device]; m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("mount %s not found in sandbox", device)
}

func (k *standIn) stats(w http.ResponseWriter, r *http.Request, g *guest) {
	device, err := url.PathUnescape(r.URL.Query().Get("path"))
	m, ferr := k.find(g, device)
	if err = errors.Join(err, ferr); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if k.answer != "" {
		fmt.Fprint(w, k.answer)
		return
	}
	u, err := m.Usage()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	fmt.Fprintf(w, `{"usage":[{"available":%d,"total":%d,"used":%d,"unit":1},{"available":%d,"total":%d,"used":%d,"unit":2}],`+
		`"volume_condition":{}}`, u.AvailableBytes, u.TotalBytes, u.UsedBytes, u.AvailableInodes, u.TotalInodes, u.UsedInodes)
}

func (k *standIn) resize(w http.ResponseWriter, r *http.Request, g *guest) {
	var body struct {
		VolumePath string
		Size       uint64
	}
	err := json.NewDecoder(r.Body).Decode(&body)
	m, ferr := k.find(g, body.VolumePath)
	if err = errors.Join(err, ferr); err == nil && !k.grows {
		err = errors.New("rpc error: code = Unimplemented")
	}
	if err == nil {
		err = m.loop.SetCapacity()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}
