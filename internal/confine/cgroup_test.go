package confine

import "testing"

func TestOwnCgroup(t *testing.T) {
	for lines, want := range map[string]string{
		"0::/kubepods.slice/pod1/box.scope\n":            "/kubepods.slice/pod1/box.scope",
		"4:memory:/a\n1:name=systemd:/b\n0::/system/c\n": "/system/c",
		"0::/\n":                   "",
		"0::/../../other\n":        "",
		"0::/a/../../b\n":          "",
		"0::relative\n":            "",
		"4:memory:/a\n":            "",
		"":                         "",
		"0::/gone/child (deleted)": "/gone/child (deleted)",
	} {
		if got, err := ownCgroup(lines); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", lines, got, err)
		}
	}
}
