package driver

import (
	"bytes"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-csi/crust-csi/internal/record"
	"github.com/crust-csi/crust-csi/pkg/crust"
	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
	"github.com/crust-csi/crust-csi/pkg/volume/static"
)

func lines(text string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		m[key] = value
	}
	return m
}

// FuzzAttributes: nothing in a class or a volume is ignored or guessed. A volume's context means on
// the node what its class said. Other people's keys change nothing. Nothing is allowed unless it is
// said explicitly.
func FuzzAttributes(f *testing.F) {
	for _, s := range []string{
		"pool=fast\nprovisioning=thick\nfsGroupStrategy=idmap\nrecursiveReadOnly=Enabled\nallowRuntimeAssistedMount=true\nhostMayMount=true",
		"csi.storage.k8s.io/pv/name=x\nfsGroupChangePolicy=Always\ncsi.storage.k8s.io/pod.fsGroupChangePolicy=OnRootMismatch",
		"device=/dev/sda\nformat=IfProbedBlank", "server=s\nshare=/x\nformat=IfProvenBlank",
		"csi.crust.dev/hostUsers=false\ncsi.crust.dev/runtimeKernel=host",
		"csi.crust.dev/runtimeKernel=Host", "csi.crust.dev/other=1", "allowRuntimeAssistedMount=TRUE", "hostmaymount=true",
		"hostMayMount= true", "", "=", "example.com/x=y",
		"csi.storage.k8s.io/pod.fsGroupChangePolicy=Sometimes", "csi.storage.k8s.io/pod.fsGroup=07",
	} {
		f.Add(s, "example.com/a=b")
	}
	node, err := static.Open(static.Options{Dir: f.TempDir()})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text, others string) {
		m := lines(text)
		a, err := parseAttributes(m, node)
		if err != nil && !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", m, err)
		}
		if err == nil && (a.AllowRuntimeAssistedMount && m["allowRuntimeAssistedMount"] != "true" ||
			a.HostMayMount && m["hostMayMount"] != "true" ||
			a.hostKernel && m[crust.ContextKernel] != "host" || a.ownUserns && m[crust.ContextHostUsers] != "false" ||
			a.podGroup != m[attrPodGroup]) {
			t.Errorf("%q was taken for %+v", m, a)
		}
		for key, value := range m {
			if words := parameters[key].values; err == nil && words != nil && !slices.Contains(words, value) {
				t.Errorf("%s=%q is taken", key, value)
			}
		}
		more := maps.Clone(m)
		for key, value := range lines(others) {
			if domain, _, ok := strings.Cut(key, "/"); ok && domain != "csi.crust.dev" && domain+"/" != orchestratorPrefix {
				more[key] = value
			}
		}
		if b, err2 := parseAttributes(more, node); !reflect.DeepEqual(a, b) || (err == nil) != (err2 == nil) {
			t.Errorf("%q is %+v (%v), and with other people's keys %+v (%v)", m, a, err, b, err2)
		}
		p, err := ParseParameters(m)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Errorf("%q: %v", m, err)
			}
			return
		}
		c, err := parseAttributes(volumeContext(ownParameters(m)), node)
		p.Pool, p.Thick = "", false // the context does not carry them
		if err != nil || c.Parameters != p {
			t.Errorf("the class says %+v, and the volume's context %+v (%v)", p, c.Parameters, err)
		}
	})
}

// FuzzCapability: an accepted use can be honoured; any other is the caller's error.
func FuzzCapability(f *testing.F) {
	mount := func(fstype string, flags ...string) *csi.VolumeCapability {
		return &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: fstype, MountFlags: flags},
		}}
	}
	block := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	for _, c := range []*csi.VolumeCapability{mount("ext4", "ro,commit=5"), mount("", "rw"), mount("../x"),
		mount("btrfs", `subvol="a,device=/dev/sda"`), mount("nfs", "vers=4.2"), block, {}} {
		for mode := range csi.VolumeCapability_AccessMode_Mode_name {
			c.AccessMode = &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_Mode(mode)}
			b, err := proto.Marshal(c)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b, false)
			f.Add(b, true)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, share bool) {
		var c csi.VolumeCapability
		if proto.Unmarshal(b, &c) != nil {
			return
		}
		u, err := parseUse(&c, share)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Errorf("%v: %v", &c, err)
			}
			return
		}
		mode := c.GetAccessMode().GetMode()
		reader := strings.Contains(mode.String(), "READER_ONLY")
		if u.mode != mode || u.readOnly != reader || reader && u.options.ReadWrite() || u.block != (c.GetBlock() != nil) ||
			u.block && share {
			t.Errorf("%v is %+v", &c, u)
		}
		if !share && strings.HasPrefix(mode.String(), "MULTI_NODE") {
			t.Errorf("%s of a volume of one node", mode)
		}
		if strings.Contains(u.fstype, "/") {
			t.Errorf("a file system %q", u.fstype)
		}
		fstype := u.fstype
		if share {
			fstype = "nfs"
		}
		if again, err := mounter.ParseOptions(u.options.List()); err != nil || mounter.CheckOptions(fstype, again) != nil {
			t.Errorf("the options %q of %q are handed on, and would be refused: %v", u.options.List(), fstype, err)
		}
		if _, err := parseUses([]*csi.VolumeCapability{&c, &c}, share); err != nil {
			t.Errorf("%v twice: %v", &c, err)
		}
	})
}

// FuzzRecords: a record of a staged or published volume counts only if it is of the volume in its
// name and of this boot.
func FuzzRecords(f *testing.F) {
	staged, err := stagedType.Encode(stagedRecord{VolumeID: "v", BootID: "boot", StagingPath: "/s", FSType: "ext4",
		Device: mounter.Device{Path: "/dev/loop1", Major: 7, Minor: 1}})
	if err != nil {
		f.Fatal(err)
	}
	published, err := publishedType.Encode(publishedRecord{VolumeID: "v", BootID: "boot", Target: "/t",
		Shown: shown{ReadOnly: recursive, Group: "5"}})
	if err != nil {
		f.Fatal(err)
	}
	for _, b := range [][]byte{staged, published} {
		f.Add("v", "/t", b)
		f.Add("w", "/t", b)
		f.Add("v", "/u", b)
		f.Add("v", "/t", b[:len(b)/2])
		f.Add("v", "/t", bytes.Replace(b, []byte(`"boot"`), []byte(`"before"`), 1))
		f.Add("v", "/t", bytes.Replace(b, []byte(`"version": 1`), []byte(`"version": 2`), 1))
	}
	log := slog.New(slog.DiscardHandler)
	f.Fuzz(func(t *testing.T, id, target string, content []byte) {
		dir := t.TempDir()
		at := filepath.Join(dir, record.Name(id)+record.Extension)
		if err := os.WriteFile(at, content, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := loadStaged(dir, "boot", log)
		if err != nil {
			t.Fatal(err)
		}
		r, ok := s.get(id)
		if all := s.all(); len(all) > 1 || len(all) == 1 != ok || ok && (r.VolumeID != id || r.BootID != "boot" || s.unusable(id) != nil) {
			t.Errorf("of %q is known %+v, by a record of %q", id, all, content)
		}
		if err := s.put(stagedRecord{VolumeID: id}); s.unusable(id) == nil && err != nil {
			t.Errorf("%q cannot be staged anew: %v", id, err)
		}
		dir = t.TempDir()
		at = filepath.Join(dir, record.Name(id, target)+record.Extension)
		if err := os.WriteFile(at, content, 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := loadPublished(dir, "boot", log)
		if err != nil {
			t.Fatal(err)
		}
		if p.add(id, target); p.m[id][target] != (shown{}) {
			var r publishedRecord
			if err := publishedType.Decode(content, &r); err != nil || r.VolumeID != id || r.Target != target || r.BootID != "boot" {
				t.Errorf("%q at %q shows %+v, by a record of %q", id, target, p.m[id][target], content)
			}
		}
	})
}
