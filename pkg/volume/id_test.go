package volume

import (
	"strings"
	"testing"
)

func TestIDs(t *testing.T) {
	long := strings.Repeat("p", MaxPoolName)
	for _, pool := range []string{"a", "fast-1", long} {
		for name, id := range map[string]string{"v": VolumeID(pool, "pvc-1"), "s": SnapshotID(pool, "pvc-1")} {
			p, key, snapshot, ok := ParseID(id)
			if !ok || p != pool || snapshot != (name == "s") || !strings.HasPrefix(key, name) || len(id) > 128 {
				t.Errorf("%s: %q %q %v %v", id, p, key, snapshot, ok)
			}
		}
	}
	for _, bad := range []string{"", "Fast", "-a", "a-", "a.b", "a/b", long + "p"} {
		if CheckPoolName(bad) == nil {
			t.Errorf("pool name %q was taken", bad)
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add(VolumeID("p", "x"))
	f.Add("../../etc/passwd")
	f.Fuzz(func(t *testing.T, id string) {
		pool, key, _, ok := ParseID(id)
		if !ok {
			return
		}
		if pool+"."+key != id || strings.ContainsAny(key, "/.\x00") || CheckPoolName(pool) != nil {
			t.Fatalf("%q was taken as %q %q", id, pool, key)
		}
	})
}
