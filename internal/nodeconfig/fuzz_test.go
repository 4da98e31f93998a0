package nodeconfig

import (
	"path/filepath"
	"testing"

	"github.com/crust-csi/crust-csi/pkg/volume"
)

// FuzzParsePool: a parsed pool equals its flag, or parsing fails.
func FuzzParsePool(f *testing.F) {
	for _, s := range []string{
		"a=loop:/d", "a=loop:/d,overcommit=1.5,reserve=1Gi", "a=loop:/d,overcommit=0x1p3",
		"a=loop:/d,reserve=1048576Gi", "a=loop:/d,reserve=2097152Gi",
		"a=loop:/d,reserve=9223372036854775807", "a=loop:/d,reserve=+64Mi", "a=loop:/d,overcommit=NaN",
		"a=loop:/d,,", "a=loop:/../..", "a=loop:/d\x00", "=loop:/d",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePool(s)
		if err != nil {
			return
		}
		if !filepath.IsAbs(p.Dir) || filepath.Clean(p.Dir) != p.Dir || volume.CheckPoolName(p.Name) != nil ||
			p.Overcommit != 0 && !(p.Overcommit >= 1 && p.Overcommit <= 10000) ||
			p.Reserve != 0 && (p.Reserve < 1<<20 || p.Reserve > 1<<50) {
			t.Errorf("%q is %+v", s, p)
		}
		text := p.String()
		if again, err := ParsePool(text); err != nil || again != p {
			t.Errorf("%q is %+v, and %q %+v (%v)", s, p, text, again, err)
		}
	})
}
