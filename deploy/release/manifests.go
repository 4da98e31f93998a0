package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/kustomize/kyaml/yaml"
)

// manifests renders what `kubectl apply -k` would take, with the release's tags.
func (r release) manifests() error {
	for dir, name := range map[string]string{"base": ".yaml", "crust": "-with-crust.yaml"} {
		b, err := r.render(filepath.Join(r.project, "deploy/kubernetes", dir))
		if err != nil {
			return err
		}
		if err := r.write(r.name(name), b); err != nil {
			return err
		}
	}
	return nil
}

func (r release) render(dir string) (_ []byte, err error) {
	overlay, err := os.MkdirTemp(r.built, "overlay-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(overlay)) }()
	k := types.Kustomization{TypeMeta: types.TypeMeta{APIVersion: types.KustomizationVersion, Kind: types.KustomizationKind}}
	from, err := filepath.Abs(overlay)
	if err != nil {
		return nil, err
	}
	to, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Rel(from, to); err != nil {
		return nil, err
	}
	k.Resources = []string{dir}
	for _, image := range images {
		k.Images = append(k.Images, types.Image{Name: "localhost/crust-csi/" + image, NewTag: r.tag()})
	}
	b, err := yaml.Marshal(k)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), b, 0o600); err != nil {
		return nil, err
	}
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), overlay)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return m.AsYaml()
}
