package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
)

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, file, content string) {
	t.Helper()
	ok(t, os.MkdirAll(filepath.Dir(file), 0o755))
	ok(t, os.WriteFile(file, []byte(content), 0o600))
}

func get(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	ok(t, err)
	return string(b)
}

// made is what a release would be built of, somewhere; the real manifests are its own.
func made(t *testing.T) release {
	dir := t.TempDir()
	r := release{version: "9.8.7", project: dir + "/project", built: dir + "/built", out: dir + "/out",
		time: time.Unix(1767225600, 0).UTC()}
	ok(t, os.Mkdir(dir+"/out", 0o755))
	put(t, r.project+"/LICENSE", "licence")
	put(t, r.project+"/CHANGELOG.md", "# Changes\n\n## Unreleased\n\n"+
		"## v9.8.7 - 2026-01-01\n\nnow\n\n## v9.8.6 - 2025-01-01\n\nbefore\n")
	ok(t, os.CopyFS(r.project+"/deploy/kubernetes", os.DirFS("../kubernetes")))
	for _, image := range images {
		put(t, r.built+"/"+image+".tar", image)
	}
	self, err := os.Executable()
	ok(t, err)
	program := get(t, self)
	for _, arch := range arches {
		put(t, r.built+"/bin/"+arch+"/csi-node", program)
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		status := "Package: zlib1g\nStatus: install ok installed\nSource: zlib (1.3)\nArchitecture: " + arch +
			"\nVersion: 1:1.3-1+b1\nDescription: of it\n more: text\n\n"
		ok(t, w.WriteHeader(&tar.Header{Name: "./var/lib/dpkg/status", Mode: 0o644, Size: int64(len(status))}))
		_, err := w.Write([]byte(status))
		ok(t, errors.Join(err, w.Close()))
		put(t, r.built+"/base-"+arch+".tar", b.String())
	}
	return r
}

func (r release) all(t *testing.T) error {
	ok(t, r.bom())
	// The test's own program takes long to pack.
	for _, arch := range arches {
		put(t, r.built+"/bin/"+arch+"/csi-node", "program")
	}
	return errors.Join(r.binaries(), r.archives(), r.chart(), r.manifests(), r.notes(), r.sums())
}

func TestTheSameBytesInAnotherPlaceAtAnotherTime(t *testing.T) {
	a, b := made(t), made(t)
	later := time.Now().Add(time.Hour)
	ok(t, filepath.WalkDir(b.project, func(file string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(file, later, later), os.Chmod(file, 0o700))
	}))
	putChart(t, a, "9.8.7-dev", "9.8.7-dev")
	putChart(t, b, "9.8.7-dev", "9.8.7-dev")
	ok(t, errors.Join(a.all(t), b.all(t)))
	sums := get(t, a.out+"/SHA256SUMS")
	if other := get(t, b.out+"/SHA256SUMS"); sums != other {
		t.Errorf("%s and\n%s", sums, other)
	}
	if got := len(regexp.MustCompile(`(?m)^[0-9a-f]{64}  \S+$`).FindAllString(sums, -1)); got != 11 {
		t.Errorf("%d files:\n%s", got, sums)
	}
}

func unpack(t *testing.T, file string) map[string]string {
	z, err := gzip.NewReader(strings.NewReader(get(t, file)))
	ok(t, err)
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		ok(t, err)
		b, err := io.ReadAll(r)
		ok(t, err)
		files[h.Name] = string(b)
		if h.ModTime.Unix() != 1767225600 || h.Uid != 0 || h.Uname != "" {
			t.Errorf("%+v", h)
		}
		if want := map[bool]int64{true: 0o755, false: 0o644}[strings.HasSuffix(h.Name, "/csi-node")]; h.Mode != want {
			t.Errorf("%s has mode %o", h.Name, h.Mode)
		}
	}
}

func TestTheBinariesHaveTheirLicence(t *testing.T) {
	r := made(t)
	for _, arch := range arches {
		put(t, r.built+"/bin/"+arch+"/csi-node", "program")
	}
	ok(t, r.binaries())
	files := unpack(t, r.out+"/crust-csi-9.8.7-linux-arm64.tar.gz")
	top := "crust-csi-9.8.7-linux-arm64/"
	if len(files) != 2 || files[top+"LICENSE"] != "licence" || files[top+"csi-node"] != "program" {
		t.Errorf("it has %d files", len(files))
	}
}

func TestTheManifestsNameTheReleasesImages(t *testing.T) {
	r := made(t)
	ok(t, r.manifests())
	for name, want := range map[string]int{"crust-csi-9.8.7.yaml": 2, "crust-csi-9.8.7-with-crust.yaml": len(images)} {
		found := map[string]bool{}
		for _, image := range regexp.MustCompile(`image: (localhost/\S+)`).FindAllStringSubmatch(get(t, r.out+"/"+name), -1) {
			found[image[1]] = true
			if !strings.HasSuffix(image[1], ":v9.8.7") {
				t.Errorf("%s: %s", name, image[1])
			}
		}
		if len(found) != want {
			t.Errorf("%s: %v", name, found)
		}
	}
}

func TestTheBillOfMaterialsHasModulesAndPackages(t *testing.T) {
	r := made(t)
	ok(t, r.bom())
	var b cyclonedx.BOM
	ok(t, cyclonedx.NewBOMDecoder(strings.NewReader(get(t, r.out+"/crust-csi-9.8.7.cdx.json")), cyclonedx.BOMFileFormatJSON).Decode(&b))
	refs := map[string]bool{b.Metadata.Component.BOMRef: true}
	for _, c := range *b.Components {
		if refs[c.BOMRef] {
			t.Errorf("%s twice", c.BOMRef)
		}
		refs[c.BOMRef] = true
	}
	for _, want := range []string{
		"linux/amd64/csi-node", "linux/arm64/csi-node",
		"pkg:deb/debian/zlib1g@1:1.3-1%2Bb1?arch=amd64&distro=debian-12&upstream=zlib",
		"pkg:deb/debian/zlib1g@1:1.3-1%2Bb1?arch=arm64&distro=debian-12&upstream=zlib",
	} {
		if !refs[want] {
			t.Errorf("no %s", want)
		}
	}
	modules := 0
	for _, d := range *b.Dependencies {
		for _, to := range *d.Dependencies {
			if !refs[to] || !refs[d.Ref] {
				t.Errorf("%s needs %s: one of them is no component", d.Ref, to)
			}
			if d.Ref == "linux/arm64/csi-node" && strings.HasPrefix(to, "pkg:golang/") {
				modules++
			}
		}
	}
	if modules < 5 {
		t.Errorf("csi-node has %d modules", modules)
	}
}
