package crust

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/fault"
)

// C15: a kubelet finds each directory that it binds, and no path of a pod leads anywhere else.
func TestC15_SubPathsAsDirectories(t *testing.T) {
	for _, c := range []struct {
		subs []string
		want []string
	}{
		{[]string{"a"}, []string{".", "a"}},
		{[]string{"b/c/d", "a", "b/e", "a"}, []string{".", "a", "b", "b/c", "b/c/d", "b/e"}},
		{[]string{"./a//b/", "a-b/c"}, []string{".", "a", "a-b", "a-b/c", "a/b"}},
		{[]string{"."}, []string{"."}},
		{[]string{"a..b/..c"}, []string{".", "a..b", "a..b/..c"}},
	} {
		text, err := FormatSubPaths(c.subs)
		if err != nil {
			t.Errorf("%q: %v", c.subs, err)
		}
		if got, err := ParseSubPaths(text); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q as %s: %q, %v; want %q", c.subs, text, got, err, c.want)
		}
	}
	many := func(n int) (subs []string) {
		for i := range n {
			subs = append(subs, "d"+strconv.Itoa(i))
		}
		return subs
	}
	if _, err := FormatSubPaths(many(maxSubPathDirectories)); err != nil {
		t.Error(err)
	}
	for _, subs := range [][]string{{".."}, {"a/../.."}, {"/a"}, {strings.Repeat("n", 256)}, {"a\x00b"}, many(maxSubPathDirectories + 1),
		{strings.Repeat("d/", maxSubPathDirectories+1)}} {
		if text, err := FormatSubPaths(subs); !fault.Is(err, fault.Invalid) {
			t.Errorf("%.60q: %.60s, %v", subs, text, err)
		}
	}
	for _, text := range []string{"", "a", "{}", "[]", `["a",1]`, `["a/"]`, `["../a"]`, `["/"]`} {
		if got, err := ParseSubPaths(text); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
}

func FuzzSubPaths(f *testing.F) {
	f.Add(`["a/b","c"]`)
	f.Add(`["."]`)
	f.Add(`["../a"]`)
	f.Fuzz(func(t *testing.T, text string) {
		dirs, err := ParseSubPaths(text)
		if err != nil {
			return
		}
		seen := map[string]bool{}
		for i, dir := range dirs {
			if !filepath.IsLocal(dir) || seen[dir] || (i == 0) != (dir == ".") || i > 0 && !seen[filepath.Dir(dir)] {
				t.Errorf("%q: %q", text, dirs)
			}
			seen[dir] = true
		}
	})
}
