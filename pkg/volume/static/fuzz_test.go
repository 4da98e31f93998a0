package static

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
	"github.com/crust-csi/crust-csi/pkg/mounter"
)

// FuzzAdopt: a volume's attributes name a device that matches the administrator's globs
// component by component, or a share that the kernel parses as written. Otherwise they are a
// fault.Invalid.
func FuzzAdopt(f *testing.F) {
	for _, s := range [][4]string{
		{"/nowhere/disk-*", "/nowhere/disk-a", "", ""}, {"/nowhere/*", "/nowhere/../etc/shadow", "", ""},
		{"/nowhere/*", "/nowhere/a/b", "", ""},
		{"/nowhere/*", "nowhere/a", "", ""}, {"/nowhere/[", "/nowhere/[", "", ""}, {"/nowhere/*", "/nowhere/x/../y", "", ""},
		{"/nowhere/*/*", "/nowhere/../shadow", "", ""},
		{"/x", "", "nfs.example.com", "/export"}, {"/x", "", "192.0.2.1", "/a b"}, {"/x", "", "2001:db8::1", "/export"},
		{"/x", "", "[2001:db8::1]", "/export"},
		{"/x", "", "[a]:b", "/export"}, {"/x", "", "a]", "/export"}, {"/x", "", "[a", "/export"}, {"/x", "", "[::1", "/e"},
		{"/x", "", "-o", "/export"}, {"/x", "", "a", "b"}, {"/x", "/x", "a", "/b"}, {"/x", "", "a", ""}, {"/x", "", "[", "/a"},
		{"/x", "", "[]", "/a"}, {"/x", "", "[-o]", "/a"},
	} {
		f.Add(s[0], s[1], s[2], s[3])
	}
	f.Fuzz(func(t *testing.T, glob, device, server, share string) {
		s, err := Open(Options{
			Dir: t.TempDir(), Allow: []string{glob}, Log: slog.New(slog.DiscardHandler),
			Claimed: func(mounter.Device) (string, bool, error) { return "", false, nil },
		})
		if err != nil {
			return
		}
		attributes := map[string]string{AttrDevice: device, AttrServer: server, AttrShare: share}
		v, err := s.Adopt("id", attributes)
		if fault.Is(err, fault.Invalid) {
			return
		}
		if device != "" {
			// Only for allowed devices does the error tell whether they exist.
			path := filepath.Clean(device)
			have, want := strings.Split(path, "/"), strings.Split(glob, "/")
			allowed := len(have) == len(want) && filepath.IsAbs(path)
			for i := range have {
				if allowed {
					ok, merr := filepath.Match(want[i], have[i])
					allowed = merr == nil && ok
				}
			}
			if !allowed && glob != path || server != "" || share != "" {
				t.Errorf("%q was allowed by %q: %v", attributes, glob, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		e, err := s.find("id")
		if err != nil || !v.Share {
			t.Fatal(v, err)
		}
		host, path, _ := strings.Cut(e.source(), ":")
		if inside, ok := strings.CutPrefix(e.source(), "["); ok {
			host, path, _ = strings.Cut(inside, "]:")
		}
		if host != strings.TrimSuffix(strings.TrimPrefix(server, "["), "]") || path != share || !strings.HasPrefix(share, "/") ||
			strings.ContainsAny(host, "[]") || strings.HasPrefix(host, "-") {
			t.Errorf("server %q and share %q are %q, which is read as %q and %q", server, share, e.source(), host, path)
		}
		if _, err := s.Adopt("id", attributes); err != nil {
			t.Errorf("%q again: %v", attributes, err)
		}
		if _, err := s.Adopt("id", map[string]string{AttrServer: server, AttrShare: share + "/x"}); err == nil {
			t.Error("one id stands for two shares")
		}
	})
}
