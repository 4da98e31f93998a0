package podvm

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	guestv1 "github.com/crust-csi/crust-csi/pkg/crust/guest/v1"
)

// withDevices is a container with devices and the rules of its cgroup, as JSON.
func withDevices(t testing.TB, devices, rules string) object {
	t.Helper()
	const from, none = `"linux": {`, `"devices": [{"allow": false, "access": "rwm"}]`
	text := strings.Replace(container, from, from+`"devices": [`+devices+`], `, 1)
	return config(t, strings.Replace(text, none, `"devices": [{"allow": false, "access": "rwm"}`+rules+`]`, 1))
}

// What containerd says of a raw block volume, by the rules of the container's cgroup.
func TestC24_RawBlockVolumesOfAContainer(t *testing.T) {
	const raw = `{"path": "/dev/xvda", "type": "b", "major": 7, "minor": 3, "fileMode": 432, "uid": 5, "gid": 6}`
	rule := func(of, access string) string { return `, {"allow": true, ` + of + ` "access": "` + access + `"}` }
	const exactly = `"type": "b", "major": 7, "minor": 3,`
	for name, c := range map[string]struct {
		rules, refused string
		readOnly       bool
	}{
		"to write":          {rules: rule(exactly, "rwm")},
		"to read":           {rules: rule(exactly, "rm"), readOnly: true},
		"of any kind":       {rules: rule(`"type": "a", "major": -1, "minor": -1,`, "rwm")},
		"all devices":       {rules: rule("", "rwm")},
		"the later holds":   {rules: rule(exactly, "rwm") + `, {"allow": false, ` + exactly + ` "access": "w"}`, readOnly: true},
		"another's":         {rules: rule(`"type": "b", "major": 7, "minor": 33,`, "rwm"), refused: "/dev/xvda"},
		"a character's":     {rules: rule(`"type": "c", "major": 7, "minor": 3,`, "rwm"), refused: "/dev/xvda"},
		"nothing":           {refused: "/dev/xvda"},
		"to write, no read": {rules: rule(exactly, "w"), refused: "/dev/xvda"},
	} {
		got, err := blockDevices(withDevices(t, raw, c.rules))
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%s: %v, %v", name, got, err)
			}
			continue
		}
		want := &guestv1.BlockDevice{Path: "/dev/xvda", Major: 7, Minor: 3, Mode: 0o660, User: 5, Group: 6, ReadOnly: c.readOnly}
		if err != nil || len(got) != 1 || !proto.Equal(got[0], want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for says, device := range map[string]string{
		"/dev/null":      `{"path": "/dev/null", "type": "c", "major": 1, "minor": 3}`,
		"/dev/without":   `{"path": "/dev/without"}`,
		"major":          `{"path": "/dev/x", "type": "b", "major": "7", "minor": 3}`,
		"value out of":   `{"path": "/dev/x", "type": "b", "major": 4294967296, "minor": 3}`,
		"invalid syntax": `{"path": "/dev/x", "type": "b", "major": 7, "minor": -1}`,
	} {
		if got, err := blockDevices(withDevices(t, device, rule("", "rwm"))); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, %v", device, got, err)
		}
	}
}

// The host's numbers of block devices are other devices in the guest.
func TestC24_AGuestGetsNoRulesForTheHostsBlockDevices(t *testing.T) {
	o := withDevices(t, "", `, {"allow": true, "type": "b", "major": 8, "minor": 0, "access": "rwm"},
		{"allow": true, "type": "a", "major": 259, "minor": 0, "access": "rwm"}, {"allow": true, "major": 259, "access": "r"},
		{"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"}`)
	b, err := forGuest(o, "one", func(object) (string, error) { return "/there", nil })
	if err != nil || strings.Contains(string(b), `"type":"b"`) || strings.Contains(string(b), "259") ||
		!strings.Contains(string(b), `"type":"c"`) || !strings.Contains(string(b), `"allow":false`) {
		t.Errorf("%s %v", b, err)
	}
}
