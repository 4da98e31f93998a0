package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
	"github.com/package-url/packageurl-go"
)

// inventory is what the release is made of, and what is in what.
type inventory struct {
	components map[string]cyclonedx.Component
	in         map[string][]string
}

func (v inventory) add(parent string, c cyclonedx.Component) {
	v.components[c.BOMRef] = c
	if parent != "" && !slices.Contains(v.in[parent], c.BOMRef) {
		v.in[parent] = append(v.in[parent], c.BOMRef)
	}
}

// bom writes the bill of materials in CycloneDX: the binaries with their Go modules,
// the image with its Debian packages, by architecture.
func (r release) bom() error {
	v := inventory{map[string]cyclonedx.Component{}, map[string][]string{}}
	self := purl(packageurl.TypeGolang, "github.com/crust-csi", "crust-csi", r.tag(), nil)
	for _, arch := range arches {
		dir := filepath.Join(r.built, "bin", arch)
		found, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, f := range found {
			if err := v.binary(self, arch, filepath.Join(dir, f.Name())); err != nil {
				return err
			}
		}
		if err := v.base(self, arch, filepath.Join(r.built, "base-"+arch+".tar")); err != nil {
			return err
		}
	}
	b := cyclonedx.NewBOM()
	b.Metadata = &cyclonedx.Metadata{
		Timestamp: r.time.Format(time.RFC3339),
		Component: &cyclonedx.Component{
			BOMRef: self, PackageURL: self, Type: cyclonedx.ComponentTypeApplication, Name: "crust-csi", Version: r.tag(),
			Licenses: &cyclonedx.Licenses{{License: &cyclonedx.License{ID: "Apache-2.0"}}},
		},
	}
	var components []cyclonedx.Component
	for _, c := range v.components {
		components = append(components, c)
	}
	slices.SortFunc(components, func(a, b cyclonedx.Component) int { return cmp.Compare(a.BOMRef, b.BOMRef) })
	var dependencies []cyclonedx.Dependency
	for ref, in := range v.in {
		slices.Sort(in)
		dependencies = append(dependencies, cyclonedx.Dependency{Ref: ref, Dependencies: &in})
	}
	slices.SortFunc(dependencies, func(a, b cyclonedx.Dependency) int { return cmp.Compare(a.Ref, b.Ref) })
	b.Components, b.Dependencies = &components, &dependencies
	var out bytes.Buffer
	if err := cyclonedx.NewBOMEncoder(&out, cyclonedx.BOMFileFormatJSON).SetPretty(true).Encode(b); err != nil {
		return err
	}
	return r.write(r.name(".cdx.json"), out.Bytes())
}

func purl(kind, namespace, name, version string, qualifiers map[string]string) string {
	return packageurl.NewPackageURL(kind, namespace, name, version, packageurl.QualifiersFromMap(qualifiers), "").ToString()
}

// binary adds one, with the modules that its linker wrote into it.
func (v inventory) binary(parent, arch, file string) error {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(content)
	name := "linux/" + arch + "/" + filepath.Base(file)
	v.add(parent, cyclonedx.Component{
		BOMRef: name, Type: cyclonedx.ComponentTypeFile, Name: name,
		Hashes: &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
	})
	module := func(path_, version string) {
		dir, base := path.Split(path_)
		ref := purl(packageurl.TypeGolang, strings.TrimSuffix(dir, "/"), base, version, nil)
		v.add(name, cyclonedx.Component{BOMRef: ref, PackageURL: ref, Type: cyclonedx.ComponentTypeLibrary, Name: path_, Version: version})
	}
	module("std", strings.TrimPrefix(info.GoVersion, "go"))
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		module(m.Path, m.Version)
	}
	return nil
}

// base adds the Debian packages that csi-node's image begins with.
func (v inventory) base(parent, arch, file string) error {
	status, err := member(file, "./var/lib/dpkg/status")
	if err != nil {
		return err
	}
	name := "linux/" + arch + "/image of csi-node"
	v.add(parent, cyclonedx.Component{BOMRef: name, Type: cyclonedx.ComponentTypeContainer, Name: name})
	for paragraph := range strings.SplitSeq(string(status), "\n\n") {
		fields := map[string]string{}
		for line := range strings.Lines(paragraph) {
			if key, value, ok := strings.Cut(line, ": "); ok && !strings.HasPrefix(line, " ") {
				fields[key] = strings.TrimSpace(value)
			}
		}
		if fields["Package"] == "" {
			continue
		}
		qualifiers := map[string]string{"arch": fields["Architecture"], "distro": "debian-12"}
		// Security advisories are about source packages.
		if source, _, _ := strings.Cut(fields["Source"], " "); source != "" {
			qualifiers["upstream"] = source
		}
		ref := purl(packageurl.TypeDebian, "debian", fields["Package"], fields["Version"], qualifiers)
		v.add(name, cyclonedx.Component{
			BOMRef: ref, PackageURL: ref, Type: cyclonedx.ComponentTypeLibrary, Name: fields["Package"], Version: fields["Version"],
		})
	}
	if len(v.in[name]) == 0 {
		return fmt.Errorf("%s: dpkg knows no packages there", file)
	}
	return nil
}

func member(archive, name string) ([]byte, error) {
	f, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := tar.NewReader(f)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%s has no %s", archive, name)
		}
		if err != nil {
			return nil, err
		}
		if h.Name == name {
			return io.ReadAll(r)
		}
	}
}
