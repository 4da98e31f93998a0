package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"sigs.k8s.io/kustomize/kyaml/yaml"
)

// In values.yaml, the tag behind the name of an image of the project.
var ownTag = regexp.MustCompile(`(?m)^(\s*repository: localhost/crust-csi/\S+\n(?:\s*#.*\n)*\s*tag: )dev$`)

// In Chart.yaml, a version of sources that are no release.
var ownVersion = regexp.MustCompile(`(?m)^((?:version|appVersion): "?[0-9.]+)` + dev + `("?)$`)

// chart packs the Helm chart, if the sources have one, with the release's version and tags in
// the place of those of the sources.
func (r release) chart() error {
	dir := filepath.Join(r.project, "deploy/helm/crust-csi")
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var entries []entry
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		switch name {
		case ".helmignore":
			return fmt.Errorf("%s: this program does not know such files and packs everything", file)
		case "Chart.yaml":
			if err := r.checkChart(content); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			if !strings.HasSuffix(r.version, dev) {
				content = ownVersion.ReplaceAll(content, []byte("$1$2"))
			}
		case "values.yaml":
			if found, all := len(ownTag.FindAll(content, -1)), len(images)+len(notReleased); found != all {
				return fmt.Errorf("%s: %d images with the tag dev, not %d", file, found, all)
			}
			content = ownTag.ReplaceAll(content, []byte("${1}"+r.tag()))
		}
		entries = append(entries, entry{name, 0o644, content})
		return nil
	})
	if err != nil {
		return err
	}
	b, err := pack("crust-csi", entries, r.time)
	if err != nil {
		return err
	}
	return r.write(r.name(".tgz"), b)
}

func (r release) checkChart(content []byte) error {
	var c struct {
		Version    string `yaml:"version"`
		AppVersion string `yaml:"appVersion"`
	}
	if err := yaml.Unmarshal(content, &c); err != nil {
		return err
	}
	want := strings.TrimSuffix(r.version, dev) + dev
	if c.Version != want || c.AppVersion != want {
		return fmt.Errorf("version %q and appVersion %q; they must be %s, and the release has them without %s",
			c.Version, c.AppVersion, want, dev)
	}
	if found := len(ownVersion.FindAll(content, -1)); found != 2 {
		return fmt.Errorf("%d lines \"version: %s\" and \"appVersion: %s\", not one of each", found, want, want)
	}
	return nil
}
