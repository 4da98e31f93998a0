package sandbox

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// The kubelet's file that names a volume's driver is in a directory where pods have directories
// too. No target leads to a file elsewhere. A device of one driver is found only for that driver's
// volumes.
func FuzzDevices(f *testing.F) {
	const good = `{"driverName": "csi.crust.dev", "volumeHandle": "v"}`
	for _, s := range []struct{ entry, device, target, data string }{
		{"csi.crust.dev=/nowhere/loop*", "/nowhere/loop1", "pods/p/v/mount", good},
		{"csi.crust.dev=/nowhere/loop*", "/nowhere/loop1", "pods/p/v/mount", `{"driverName": "other"}`},
		{"csi.crust.dev=/nowhere/loop*", "/nowhere/loop1", "../outside/mount", good},
		{"csi.crust.dev=/nowhere/loop*", "/nowhere/loop1", "link/mount", good},
		{"csi.crust.dev=/nowhere/loop*", "/nowhere/loop1", "pods/p/v/../../../link/x", good},
		{"csi.crust.dev=/nowhere/loop*", "/nowhere/loop1", "pods/p/v/mount", good[:30]},
		{"/nowhere/disk-?", "/nowhere/disk-a", "x", ""}, {"/nowhere/*", "/nowhere/a/../../etc/shadow", "x", ""},
		{"/nowhere/*", "/nowhere/a\nb", "x", ""}, {"=/nowhere/*", "/nowhere/a", "x", ""}, {"a=b=/x", "b=/x", "x", ""}, {"[", "[", "x", ""},
	} {
		f.Add(s.entry, s.device, s.target, []byte(s.data))
	}
	f.Fuzz(func(t *testing.T, entry, device, target string, data []byte) {
		if driver, pattern, err := SplitAllowed(entry); err == nil {
			glob := string(pattern)
			if again := driver + "=" + glob; again != entry && (driver != "" || glob != entry) || !filepath.IsAbs(glob) {
				t.Errorf("%q is the pattern %q of %q", entry, glob, driver)
			}
		}
		dir := t.TempDir()
		root := filepath.Join(dir, "kubelet")
		for _, sub := range []string{"kubelet/pods/p/v", "outside"} {
			if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for name, b := range map[string][]byte{
			"kubelet/pods/p/v/vol_data.json": data, "outside/vol_data.json": []byte(`{"driverName": "of outside"}`),
			"vol_data.json": []byte(`{"driverName": "of outside"}`),
		} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink("../outside", filepath.Join(root, "link")); err != nil {
			t.Fatal(err)
		}
		d := Devices{Allow: []string{entry}}
		at := root + "/" + target
		name, err := driverOf(root, at)
		if err == nil && name == "of outside" && !bytes.Contains(data, []byte("outside")) {
			t.Errorf("the target %q was looked up outside of the kubelet's directory", target)
		}
		if _, err := d.find(root, device, at); err == nil || !fault.Is(err, fault.Invalid) {
			// It was allowed; only the device is missing.
			driver, pattern, serr := SplitAllowed(entry)
			if serr != nil {
				return
			}
			glob := string(pattern)
			match, merr := filepath.Match(glob, device)
			if glob != device && (merr != nil || !match) || filepath.Clean(device) != device || strings.ContainsAny(device, "\x00\n") {
				t.Errorf("device %q was allowed by %q: %v", device, entry, err)
			}
			if driver != "" && driver != name {
				t.Errorf("device %q of %q was allowed for a volume of %q (%q): %v", device, driver, name, data, err)
			}
		}
	})
}

// A record belongs to the sandbox in its name and is complete, or it counts as unusable. Its file
// is not changed.
func FuzzStore(f *testing.F) {
	gid := uint32(7)
	spec, err := NewSpec("a", 0, map[string]any{"qmp": "/q", "channel": "/c", "magic": []byte("0123456789abcdef")})
	if err != nil {
		f.Fatal(err)
	}
	whole, err := sandboxType.Encode(sandboxRecord{
		Kind: "qemu", Spec: spec, BootID: "boot", Process: process{PID: 2, Started: "3", Namespace: "pid:[4]"},
		Volumes: map[string]volumeRecord{"/dev/loop1": {
			State: published, Device: mounter.Device{Path: "/dev/loop1", Major: 7, Minor: 1}, Target: "/t", Type: "ext4",
			Options: []string{"ro", "commit=5"}, Group: &gid, Policy: "Always",
			Place: Place{Device: "/dev/sda", Path: "/p"},
		}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add("a", whole)
	f.Add("b", whole)
	f.Add("a", whole[:len(whole)/2])
	f.Add("a", bytes.Replace(whole, []byte(`"version": 1`), []byte(`"version": 2`), 1))
	f.Add("", []byte(`{"kind": "crust.sandbox", "version": 1, "data": null}`))
	f.Add("a", []byte(`{"kind": "crust.sandbox", "version": 1, "data": {"spec": {"id": "a"}, "volumes": {"x": {"options": ["ro,rw"]}}}}`))
	f.Fuzz(func(t *testing.T, id string, content []byte) {
		s := newStore(t.TempDir())
		if err := os.WriteFile(s.path(id), content, 0o600); err != nil {
			t.Fatal(err)
		}
		list, bad, err := s.load()
		if err != nil || len(list)+len(bad) != 1 {
			t.Fatalf("%d records, %d bad, %v", len(list), len(bad), err)
		}
		if now, err := os.ReadFile(s.path(id)); err != nil || !bytes.Equal(now, content) {
			t.Errorf("the file became %q: %v", now, err)
		}
		if len(bad) == 1 {
			if bad[s.path(id)] == nil {
				t.Errorf("bad is %v", bad)
			}
			return
		}
		if list[0].Spec.ID != id {
			t.Fatalf("the record of %q is of %q", id, list[0].Spec.ID)
		}
		if err := s.put(list[0]); err != nil {
			t.Fatal(err)
		}
		again, _, err := s.load()
		was, _ := json.Marshal(list)
		if is, _ := json.Marshal(again); err != nil || !reflect.DeepEqual(was, is) {
			t.Errorf("%s became %s: %v", was, is, err)
		}
	})
}
