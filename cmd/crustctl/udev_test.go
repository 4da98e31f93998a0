package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A01: the doctor says whether udevd reads what guests write. What udevd has noted counts more than a file of rules.
func TestA01_TheDoctorAsksWhatUdevdReads(t *testing.T) {
	const runs, rule = "run/udev/control", "etc/udev/rules.d/59-crust.rules"
	const comm, pids = "proc/7/comm", "proc/self/ns/pid"
	const loop, numbers, notes = "sys/block/loop3/loop/backing_file", "sys/block/loop3/dev", "run/udev/data/b7:3"
	for name, c := range map[string]struct {
		files map[string]string
		want  string
	}{
		"no udevd": {map[string]string{rule: "", comm: "bash\n", pids: initialPIDs}, "yes: no udevd runs here"},
		"a udevd outside of this container": {map[string]string{rule: "", comm: "systemd-udevd\n", pids: initialPIDs},
			"cannot tell: a udevd runs"},
		"a container with processes of its own": {map[string]string{rule: "", comm: "bash\n", pids: "pid:[4026532001]"},
			"cannot tell: this is a container"},
		"no /proc": {nil, "cannot tell: this is a container"},
		"no rule":  {map[string]string{runs: ""}, "no: it has no rule"},
		"a rule":   {map[string]string{runs: "", rule: ""}, "yes"},
		"a volume that was attached before the rule": {map[string]string{
			runs: "", rule: "", loop: "/pool/volumes/v00.img\n", numbers: "7:3\n", notes: "I:1\nE:ID_FS_TYPE=x\n"},
			"no: it has looked at /dev/loop3"},
		"a rule elsewhere": {map[string]string{
			runs: "", loop: "/pool/volumes/v00.img\n", numbers: "7:3\n", notes: "I:1\nE:CRUST=1\nG:systemd\n"}, "yes"},
		"notes that cannot be read": {map[string]string{
			runs: "", rule: "", loop: "/pool/volumes/v00.img\n", numbers: "7:3\n", notes + "/directory": ""}, "cannot tell: "},
		"somebody else's device": {map[string]string{
			runs: "", rule: "", loop: "/home/v00.img\n", numbers: "7:3\n", notes: "I:1\nE:ID_FS_TYPE=x\n"}, "yes"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, text := range c.files {
				path := filepath.Join(root, file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				var err error
				if file == pids {
					err = os.Symlink(text, path)
				} else {
					err = os.WriteFile(path, []byte(text), 0o644)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if got := udevd(root); !strings.HasPrefix(got.Answer, c.want) || (got.Do == "") != strings.HasPrefix(c.want, "yes") {
				t.Errorf("%+v", got)
			}
		})
	}
}
