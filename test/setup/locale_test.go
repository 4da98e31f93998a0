package setup

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// german makes a program print German, if its German is installed.
var german = []string{"LC_ALL=C.UTF-8", "LANGUAGE=de"}

// apt translates "Depends:". The packages are the test's own, because a machine's lists may be empty.
func TestFleet_AGermanMachine(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"status": `Package: linux-image-cloud-amd64
Status: install ok installed
Version: 6.1.1-1
Architecture: amd64
Maintainer: nobody
Depends: linux-image-6.1.0-1-cloud-amd64 (= 6.1.1-1)
Description: a meta package

Package: linux-image-6.1.0-1-cloud-amd64
Status: install ok installed
Version: 6.1.1-1
Architecture: amd64
Maintainer: nobody
Description: an image

Package: linux-image-without
Status: install ok installed
Version: 1
Architecture: amd64
Maintainer: nobody
Description: a package without dependencies
`,
		"apt.conf": `Dir::State::status "` + dir + `/status"; Dir::State::lists "` + dir + `/lists"; Dir::Cache "` + dir + `/cache";
Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "/dev/null";
`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for meta, want := range map[string]string{
		"linux-image-cloud-amd64": "linux-image-6.1.0-1-cloud-amd64\n",
		"linux-image-without":     "kernel-package: linux-image-without depends on no linux-image-VERSION",
	} {
		c := exec.Command("../../scripts/kernel-package.sh", meta)
		c.Env = append(append(os.Environ(), german...), "APT_CONFIG="+dir+"/apt.conf")
		out, err := c.CombinedOutput()
		if !strings.HasPrefix(string(out), want) || (err == nil) != strings.HasSuffix(want, "\n") {
			t.Errorf("%s: %v, not %q:\n%s", meta, err, want, out)
		}
	}
}

// Scripts read what programs print, so each sets a locale of its own.
func TestFleet_EveryScriptHasItsLocale(t *testing.T) {
	found := 0
	err := filepath.WalkDir("../..", func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch name := d.Name(); {
		case d.IsDir() && (name == ".git" || name == ".cache" || name == "bin" || name == "dist"):
			return filepath.SkipDir
		case filepath.Ext(name) != ".sh" && path != "../../.ci/run":
			return nil
		}
		text, err := os.ReadFile(path)
		sourced := !strings.HasPrefix(string(text), "#!")
		if found++; !sourced && !strings.Contains(string(text), "\nexport LC_ALL=C") {
			t.Errorf("%s does not set LC_ALL=C", path)
		}
		return err
	})
	if err != nil || found < 30 {
		t.Errorf("%d scripts: %v", found, err)
	}
}
