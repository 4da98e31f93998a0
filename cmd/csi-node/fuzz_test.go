package main

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

// FuzzParsePool: a pool is what its flag says, or nothing.
func FuzzParsePool(f *testing.F) {
	for _, s := range []string{
		"a=loop:/d", "a=loop:/d,overcommit=1.5,reserve=1Gi", "a=loop:/d,overcommit=0x1p3", "a=loop:/d,reserve=1048576Gi", "a=loop:/d,reserve=2097152Gi", "a=loop:/d,reserve=9223372036854775807",
		"a=loop:/d,reserve=+64Mi", "a=loop:/d,overcommit=NaN", "a=loop:/d,,", "a=loop:/../..", "a=loop:/d\x00", "=loop:/d",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := parsePool(s)
		if err != nil {
			return
		}
		if !filepath.IsAbs(p.dir) || filepath.Clean(p.dir) != p.dir || volume.CheckPoolName(p.name) != nil ||
			p.overcommit != 0 && !(p.overcommit >= 1 && p.overcommit <= 10000) || p.reserve != 0 && (p.reserve < 1<<20 || p.reserve > 1<<50) {
			t.Errorf("%q is %+v", s, p)
		}
		text := p.name + "=loop:" + p.dir
		if p.overcommit != 0 {
			text += fmt.Sprintf(",overcommit=%g", p.overcommit)
		}
		if p.reserve != 0 {
			text += fmt.Sprintf(",reserve=%d", p.reserve)
		}
		if again, err := parsePool(text); err != nil || again != p {
			t.Errorf("%q is %+v, and %q %+v (%v)", s, p, text, again, err)
		}
	})
}
