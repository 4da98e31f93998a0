package loopdev

import "testing"

// A pod can set a loop device's name to any text. Only a name that the driver could have written is
// a hold.
func FuzzParseHold(f *testing.F) {
	for _, h := range []hold{
		{backing: file{dev: 0x10302, ino: 131077}, limit: 1 << 30, sector: 512, flags: 5},
		{backing: file{dev: 1<<64 - 1, ino: 1<<64 - 1}, offset: 1 << 20, sector: 4096, readOnly: true},
	} {
		f.Add(h.label())
	}
	for _, label := range []string{"", "crust:", "crust:1:2:3:4:zzzzzzzz:5:w", "crust:01:2:3:4:5:6:w", "crust:A:2:3:4:5:6:w",
		"crust:1:2:3:4:5:6:x", "crust:1:2:3:4:5:6:w:", "Crust:1:2:3:4:5:6:w"} {
		f.Add(label)
	}
	f.Fuzz(func(t *testing.T, label string) {
		if h, ok := parseHold("loop1", label); ok && (h.label() != label || h.name != "loop1") {
			t.Errorf("%q is read as %q", label, h.label())
		}
	})
}
