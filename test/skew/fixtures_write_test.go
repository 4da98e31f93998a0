//go:build fixtures

package skew

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-csi/crust-csi/internal/csiclient"
	"github.com/crust-csi/crust-csi/internal/testcrust"
	"github.com/crust-csi/crust-csi/internal/testnode"
)

// fixtures are files that the programs of a version wrote, below testdata.
type fixtures struct {
	t       *testing.T
	dir     string // of the version
	replace []string
}

// take keeps a record under its kind, and replaces what is specific to this machine.
func (f *fixtures) take(path, kind, name string) {
	f.t.Helper()
	b, err := os.ReadFile(path)
	ok(f.t, err)
	if kind == "" {
		var r struct{ Kind string }
		ok(f.t, json.Unmarshal(b, &r))
		kind = r.Kind
	}
	ok(f.t, os.MkdirAll(filepath.Join(f.dir, kind), 0o755))
	text := strings.NewReplacer(f.replace...).Replace(string(b))
	ok(f.t, os.WriteFile(filepath.Join(f.dir, kind, name), []byte(text), 0o644))
}

// all keeps every record below a directory. File names are hashes of paths here.
func (f *fixtures) all(dir, prefix string) {
	f.t.Helper()
	files, err := exec.Command("find", dir, "-name", "*.json", "-type", "f").Output()
	ok(f.t, err)
	for i, path := range strings.Fields(string(files)) {
		f.take(path, "", prefix+"-"+string(rune('a'+i))+".json")
	}
}

// TestWriteFixtures runs the programs of CRUST_FIXTURES (a release, or "today" for records that no
// release has written yet), and keeps every kind of record that they write.
func TestWriteFixtures(t *testing.T) {
	version := os.Getenv("CRUST_FIXTURES")
	if version == "" {
		t.Fatal("CRUST_FIXTURES says whose records: a version in test/skew/releases, or today")
	}
	dir := version
	if version == today {
		dir = "next"
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	ok(t, err)
	var kernel unix.Utsname
	ok(t, unix.Uname(&kernel))
	f := &fixtures{t: t, dir: filepath.Join("testdata", dir), replace: []string{
		strings.TrimSpace(string(boot)), "00000000-0000-4000-8000-000000000000", unix.ByteSliceToString(kernel.Release[:]), "6.1.0",
	}}
	disk := blankAtFirst(t)
	n := testnode.NewStopped(t, "", "--allow-device", disk)
	f.replace = append(f.replace, n.Dir, "/node")
	n.Bin = program(t, version, "csi-node")
	n.Begin()
	s := testcrust.NewServer(t, n, "namespace", program(t, version, "crustd"))
	a := testcrust.NewAgent(t, s, program(t, version, "crust-agent"))

	made := newFleet(t, n, "made", 1)
	pod := newTenant(t, a, "pod")
	pod.begin()
	// A device that is not blank: the record keeps how far it was read.
	static := csiclient.Volume{ID: "static", FSType: "ext4", Context: map[string]string{"device": disk}}
	refused(t, n.Client.Stage(ctxOf(t), static), codes.FailedPrecondition, "data at offset")
	raw := csiclient.Volume{ID: "raw", Block: true, Context: map[string]string{"device": disk}}
	ok(t, n.Client.Stage(ctxOf(t), raw))
	_, err = n.Client.NodeGetVolumeStats(ctxOf(t), &csi.NodeGetVolumeStatsRequest{VolumeId: "raw", VolumePath: n.Target("none")})
	if err == nil {
		t.Error("stats of nothing")
	}
	f.all(filepath.Join(n.Dir, "state"), "csi-node")
	f.all(n.PoolDir(), "pool")
	f.all(filepath.Join(a.Dir, "state"), "crust-agent")
	f.all(s.StateDir(), "crustd")
	attribute := make([]byte, 100)
	got, err := unix.Getxattr(made.pods["ext4"].target(), "trusted.crust.ownership", attribute)
	ok(t, err)
	at := filepath.Join(t.TempDir(), "ownership")
	ok(t, os.WriteFile(at, attribute[:got], 0o600))
	f.take(at, "ownership", "text")
	ok(t, n.Client.Unstage(ctxOf(t), "raw"))
	pod.end()
	s.Delete(pod.v)
	made.remove()
	f.take(filepath.Join(n.Dir, "state/audit.jsonl"), "audit", "audit.jsonl")
	f.complete(version)
}

// blankAtFirst makes a loop device that is zero up to the first noted position, and then is not,
// away from the marks of all formats.
func blankAtFirst(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(file, slices.Concat(make([]byte, 90<<20), bytes.Repeat([]byte{7}, 4096), make([]byte, 40<<20)), 0o600))
	out, err := exec.Command("losetup", "--find", "--show", file).Output()
	ok(t, err)
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() { ok(t, exec.Command("losetup", "-d", device).Run()) })
	return device
}

// complete are bodies of tests for the version's own packages, with a function Fill appended. They
// write each record with every field, and the records that need a microVM, or KVM.
var complete = map[string]string{
	"internal/microvm": `stateDir = out
	writeFixture(t, verdicts, &verdict{})
	vm := VM{PID: 4711, QMP: "/vm/qmp", Channel: "/vm/channel", Magic: "00ff", Console: "/vm/console", Accel: "tcg"}
	if err := vm.Save(out); err != nil {
		t.Fatal(err)
	}`,
	"pkg/orchestrator": `writeFixture(t, deferralType, &Deferral{})`,
	"pkg/driver": `writeFixture(t, publishedType, &publishedRecord{})
	writeFixture(t, deferralType, &deferral{})
	writeFixture(t, stagedType, &stagedRecord{})`,
	"pkg/crust/sandbox":      `writeFixture(t, sandboxType, &sandboxRecord{})`,
	"pkg/crust/sandbox/qemu": `writeFixture(t, factsType, &guestFacts{})`,
	"pkg/volume/static": `writeFixture(t, entryType, &entry{})
	writeFixture(t, deviceType, &deviceRecord{})
	writeFixture(t, readType, &readRecord{})`,
	"pkg/volume/looppool": `writeFixture(t, volumeType, &volumeRecord{})
	writeFixture(t, snapshotType, &snapshotRecord{})`,
	"pkg/volume/poolhome": `writeFixture(t, identityType, &identity{})
	writeFixture(t, knownType, &known{})`,
}

const writeAll = `package %s

import (
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/crust-csi/crust-csi/internal/record"
)

func writeFixture(t *testing.T, kind record.Type, v any) {
	Fill(v)
	if err := kind.Write(os.Getenv("OUT")+"/"+kind.Kind+".json", v); err != nil {
		t.Fatal(err)
	}
}

func TestFixtureIsWritten(t *testing.T) {
	out := os.Getenv("OUT")
	_ = out
	%s
}
%s`

// complete makes the version's own code write records with every field.
func (f *fixtures) complete(version string) {
	f.t.Helper()
	root := testnode.Root(f.t)
	tree := root
	if version != today {
		tree = filepath.Join(testnode.ReleaseDir(f.t, version), "source")
	}
	text, err := os.ReadFile(filepath.Join(root, "internal/recordtest/fill.go"))
	ok(f.t, err)
	_, fill, _ := strings.Cut(string(text), ")\n") // without its imports
	out := f.t.TempDir()
	for pkg, body := range complete {
		file := filepath.Join(tree, pkg, "fixture_written_test.go")
		ok(f.t, os.WriteFile(file, fmt.Appendf(nil, writeAll, filepath.Base(pkg), body, fill), 0o600))
		c := exec.Command("go", "test", "-count=1", "-run", "TestFixtureIsWritten", "./"+pkg)
		c.Dir, c.Env = tree, append(os.Environ(), "OUT="+out)
		said, err := c.CombinedOutput()
		ok(f.t, os.Remove(file))
		if err != nil {
			f.t.Fatalf("%s: %v\n%s", pkg, err, said)
		}
	}
	written, err := filepath.Glob(filepath.Join(out, "*.json"))
	ok(f.t, err)
	for _, path := range written {
		if filepath.Base(path) == "vm.json" {
			f.take(path, "microvm", "vm.json")
		} else {
			f.take(path, "", "every-field.json")
		}
	}
}
