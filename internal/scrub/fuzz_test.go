package scrub

import (
	"encoding/json"
	"strings"
	"testing"
)

const mark = "LEFTOUT" // LeftOut without a space

// FuzzMountLine: only known options are shown, and no login names.
func FuzzMountLine(f *testing.F) {
	const head = "36 35 98:0 / /mnt rw,noatime master:1 - "
	for _, s := range []string{
		head + "ext4 /dev/loop3 rw,errors=continue", head + "cifs //me:secret@server/share rw,password=secret",
		head + "fuse.x me:secret@server rw,secret",
		head + "nfs4 server:/share rw,vers=4.2,addr=10.0.0.1", strings.Replace(head, "rw", "//rw@", 1) + "a b c d", "a b c d e f - g h",
		"36 35 98:0 /mnt rw,secret master:1 - ext4 a rw", strings.Replace(head, "/mnt", "/m\u00a0nt", 1) + "a b c",
		head + "a //b@c context=//x,rw@ y",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		got := MountLine(line)
		if user.MatchString(got) {
			t.Errorf("%q shows who logs in: %q", line, got)
		}
		if got == LeftOut {
			return
		}
		before, after, ok := strings.Cut(strings.ReplaceAll(got, LeftOut, mark), " - ")
		head, tail := strings.Split(before, " "), strings.Split(after, " ")
		if !ok || len(head) < 6 || !strings.HasPrefix(head[4], "/") || len(tail) < 2 {
			t.Fatalf("%q became %q", line, got)
		}
		if name, _, ok := strings.Cut(tail[1], "@"); ok && strings.TrimPrefix(name, "//") != mark && !strings.HasSuffix(name, "//"+mark) {
			t.Errorf("%q shows who logs in: %q", line, got)
		}
		for _, list := range []string{head[5], strings.Join(tail[2:], " ")} {
			for _, o := range strings.Split(list, ",") {
				if name, _, _ := strings.Cut(o, "="); o != "" && o != mark && !options[name] {
					t.Errorf("%q shows option %q: %q", line, o, got)
				}
			}
		}
	})
}

// FuzzRecord: a value is shown only below a known key.
func FuzzRecord(f *testing.F) {
	for _, s := range []string{
		`{"kind": "crust-csi.staged", "version": 1, "data": {"volumeID": "v", "share": "nfs://me:secret@server", "superblockOptions": "ro,password=secret"}}`,
		`{"kind": "crust-csi.x", "data": {"options": {"ro": "", "password": "secret", "data": {"a": ["b"]}}, "volume": {"parameters": {"pool": ["p"], "x": 1}}}}`,
		`{"kind": "crust-csi.//me:secret@h"}`, `{"kind": "crust-csi.x", "data": "secret"}`,
		`{"kind": "crust-csi.x", "data": ["secret", {"id": "v"}]}`, `{"Kind": "crust-csi.x"} x`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := Record(b)
		if err != nil {
			if len(got) != 0 || !strings.HasPrefix(err.Error(), "not a record") || len(err.Error()) > 40 {
				t.Errorf("%q: %q, %v", b, got, err)
			}
			return
		}
		var record map[string]any
		if err := json.Unmarshal(got, &record); err != nil {
			t.Fatalf("%q became %q: %v", b, got, err)
		}
		for _, c := range record["kind"].(string) {
			if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz-.", c) {
				t.Errorf("%q is of kind %q", b, record["kind"])
			}
		}
		shown(t, "", record["data"])
	})
}

// shown fails the test for anything that should not be below a key.
func shown(t *testing.T, key string, v any) {
	switch v := v.(type) {
	case string:
		if key == "" || user.MatchString(v) {
			t.Errorf("%q is shown below %q", v, key)
		}
		for _, o := range strings.Split(strings.ReplaceAll(v, LeftOut, mark), ",") {
			if name, _, _ := strings.Cut(o, "="); listed[key] && o != "" && o != mark && !options[name] {
				t.Errorf("option %q is shown", o)
			}
		}
	case float64, bool:
		if key == "" {
			t.Errorf("%v is shown below no key", v)
		}
	case []any:
		for _, one := range v {
			shown(t, key, one)
		}
	case map[string]any:
		for k, below := range v {
			if below == LeftOut || listed[key] && k == LeftOut && below == "" {
				continue
			}
			if listed[key] && !options[k] || !listed[key] && !keys[k] {
				t.Errorf("%q is shown below %q, below %q", below, k, key)
			}
			shown(t, k, below)
		}
	}
}

// FuzzArgs: only known flags and their values are shown.
func FuzzArgs(f *testing.F) {
	f.Add("csi-node\n--pool\na=loop:/pool\n-v=4\n--token=secret\n--password\nsecret\nsecret\n--pool\n--token=secret")
	f.Add("csi-node\n--v\n--v\nx\n---v\ny\n-\n--\n//a@b")
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, "\n")
		got := Args(args)
		if len(got) != len(args) {
			t.Fatalf("%q became %q", args, got)
		}
		flag := func(a string) (known, hasValue bool) {
			return strings.HasPrefix(a, "-") && flags[flagName(a)], strings.Contains(a, "=")
		}
		for i, a := range got {
			if i > 0 && a != LeftOut && strings.HasPrefix(a, "-") && !flags[flagName(a)] {
				t.Errorf("%q shows %q", args, a)
			}
			if user.MatchString(a) {
				t.Errorf("%q shows who logs in: %q", args, a)
			}
			known, _ := flag(args[i])
			if i == 0 || a == LeftOut || known {
				continue
			}
			if before, hasValue := flag(args[i-1]); i == 1 || !before || hasValue {
				t.Errorf("%q shows %q", args, a)
			}
		}
	})
}

func flagName(a string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(a, "-"), "-"), "=")
	return name
}
