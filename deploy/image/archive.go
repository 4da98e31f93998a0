package main

import (
	"archive/tar"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// write makes an archive of an OCI image layout.
func (o options) write() (err error) {
	dir, err := os.MkdirTemp(filepath.Dir(o.out), ".image-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	names := layout.WithAnnotations(map[string]string{"io.containerd.image.name": o.name, "org.opencontainers.image.ref.name": o.name})
	if err := o.fill(p, names); err != nil {
		return err
	}
	next := o.out + ".new"
	f, err := os.Create(next)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	err = filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || file == dir {
			return err
		}
		name, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		h := tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: o.created}
		if d.IsDir() {
			return w.WriteHeader(&h)
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		h.Typeflag, h.Name, h.Mode, h.Size = tar.TypeReg, name, 0o644, int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	if err := errors.Join(err, w.Close(), f.Close()); err != nil {
		return err
	}
	return os.Rename(next, o.out)
}

// fill puts the image, or the index of them, into a layout.
func (o options) fill(p layout.Path, names layout.Option) error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range o.arches {
		img, err := o.of(arch).build()
		if err != nil {
			return err
		}
		if len(o.arches) == 1 {
			return p.AppendImage(img, names)
		}
		platform := &v1.Platform{OS: "linux", Architecture: arch}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: platform}})
	}
	return p.AppendIndex(index, names)
}
