package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// inputs are a base and a program of each architecture, in a directory of their own.
func inputs(t *testing.T, arches ...string) options {
	dir := t.TempDir()
	for _, arch := range arches {
		ok(t, os.WriteFile(dir+"/"+arch, []byte("program of "+arch), 0o600))
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		ok(t, w.WriteHeader(&tar.Header{Name: "./base-of-" + arch, Mode: 0o644}))
		ok(t, w.Close())
		ok(t, os.WriteFile(dir+"/base-"+arch, b.Bytes(), 0o600))
	}
	return options{
		name: "localhost/test/image:v1", out: dir + "/image.tar", base: dir + "/base-{arch}", entrypoint: []string{"/bin/program"},
		entries: []string{dir + "/{arch}=/bin/program"}, arches: arches, created: time.Unix(1767225600, 0).UTC(), level: 9,
	}
}

// imported is what containerd makes of the archive: its store, and the image's target.
func imported(t *testing.T, o options) (content.Store, ocispec.Descriptor) {
	store, err := local.NewStore(t.TempDir())
	ok(t, err)
	f, err := os.Open(o.out)
	ok(t, err)
	defer f.Close()
	top, err := archive.ImportIndex(context.Background(), store, f)
	ok(t, err)
	b, err := content.ReadBlob(context.Background(), store, top)
	ok(t, err)
	var index ocispec.Index
	ok(t, json.Unmarshal(b, &index))
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations[images.AnnotationImageName] != o.name {
		t.Fatalf("containerd finds %+v", index.Manifests)
	}
	return store, index.Manifests[0]
}

// files are those of the image for one architecture, as containerd would unpack it.
func files(t *testing.T, store content.Store, target ocispec.Descriptor, arch string) map[string]string {
	ctx := context.Background()
	platform := platforms.OnlyStrict(ocispec.Platform{OS: "linux", Architecture: arch})
	manifest, err := images.Manifest(ctx, store, target, platform)
	ok(t, err)
	b, err := content.ReadBlob(ctx, store, manifest.Config)
	ok(t, err)
	var config ocispec.Image
	ok(t, json.Unmarshal(b, &config))
	if config.Architecture != arch || config.OS != "linux" || !slices.Equal(config.Config.Entrypoint, []string{"/bin/program"}) {
		t.Errorf("%s: %+v", arch, config)
	}
	found := map[string]string{}
	for _, layer := range manifest.Layers {
		b, err := content.ReadBlob(ctx, store, layer)
		ok(t, err)
		r, err := uncompressed(b)
		ok(t, err)
		for {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			ok(t, err)
			if strings.HasPrefix(h.Name, "bin") && h.ModTime.Unix() != 1767225600 {
				t.Errorf("%s is of %s", h.Name, h.ModTime)
			}
			b, err := io.ReadAll(r)
			ok(t, err)
			found[strings.TrimPrefix(h.Name, "./")] = string(b)
		}
	}
	return found
}

func TestContainerdFindsTheImageOfItsArchitecture(t *testing.T) {
	for _, arches := range [][]string{{"amd64"}, {"amd64", "arm64"}, {"arm64"}} {
		o := inputs(t, arches...)
		ok(t, o.write())
		store, target := imported(t, o)
		if index := images.IsIndexType(target.MediaType); index != (len(arches) > 1) {
			t.Errorf("%v: an index: %v", arches, index)
		}
		for _, arch := range arches {
			got := files(t, store, target, arch)
			_, based := got["base-of-"+arch]
			if len(got) != 2 || got["bin/program"] != "program of "+arch || !based {
				t.Errorf("%v: the image of %s has %q", arches, arch, got)
			}
		}
	}
}

func TestTheSameBytesInAnotherPlace(t *testing.T) {
	a, b := inputs(t, "amd64", "arm64"), inputs(t, "amd64", "arm64")
	later := time.Now().Add(time.Hour)
	ok(t, filepath.WalkDir(filepath.Dir(b.out), func(file string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(file, later, later), os.Chmod(file, 0o700))
	}))
	ok(t, errors.Join(a.write(), b.write()))
	one, err := os.ReadFile(a.out)
	ok(t, err)
	two, err := os.ReadFile(b.out)
	ok(t, err)
	if !bytes.Equal(one, two) {
		t.Error("the archives differ")
	}
	// Two runs in one second would not show a time of today.
	for r := tar.NewReader(bytes.NewReader(one)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		ok(t, err)
		mode := map[byte]int64{tar.TypeDir: 0o755, tar.TypeReg: 0o644}[h.Typeflag]
		if !h.ModTime.Equal(a.created) || h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Mode != mode {
			t.Errorf("%+v", h)
		}
	}
	left, err := filepath.Glob(filepath.Dir(a.out) + "/.image-*")
	ok(t, err)
	if len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

func uncompressed(b []byte) (*tar.Reader, error) {
	z, err := gzip.NewReader(bytes.NewReader(b))
	return tar.NewReader(z), err
}
