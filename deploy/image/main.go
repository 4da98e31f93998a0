// Command image writes an OCI image as an archive, without a daemon or a
// registry. The same input gives the same bytes.
//
//	image -name NAME -out FILE.tar [-arch ARCH[,ARCH]...] [-base ROOT.tar] [-entrypoint PATH]... SOURCE=PATH[=MODE]... LINK->TARGET...
//
// {arch} in ROOT.tar and in a SOURCE is the architecture. With more than one, the
// archive has an index of an image for each.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

type options struct {
	name, out, base string
	entrypoint      []string
	entries         []string
	arches          []string
	created         time.Time
	level           int
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run() error {
	var o options
	flag.StringVar(&o.name, "name", "", "name and tag, as manifests have it")
	flag.StringVar(&o.out, "out", "", "archive to write")
	flag.StringVar(&o.base, "base", "", "archive of a root directory to begin with; none: an empty one")
	flag.IntVar(&o.level, "level", gzip.BestSpeed, "of compression; 0 for machines that take long to unpack")
	flag.Func("entrypoint", "a word of the entrypoint; repeatable", func(s string) error {
		o.entrypoint = append(o.entrypoint, s)
		return nil
	})
	arches := flag.String("arch", runtime.GOARCH, "architectures, with commas between them")
	flag.Parse()
	o.entries, o.arches = flag.Args(), strings.Split(*arches, ",")
	if o.name == "" || o.out == "" {
		return errors.New("give -name and -out")
	}
	epoch, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH: %w; set it to the time that all files are to have", err)
	}
	o.created = time.Unix(epoch, 0).UTC()
	return o.write()
}

// of gives the options of one architecture.
func (o options) of(arch string) options {
	o.base = strings.ReplaceAll(o.base, "{arch}", arch)
	o.entries = slices.Clone(o.entries)
	for i, e := range o.entries {
		o.entries[i] = strings.ReplaceAll(e, "{arch}", arch)
	}
	o.arches = []string{arch}
	return o
}

// build makes the image of the one architecture that o has.
func (o options) build() (v1.Image, error) {
	var layers []v1.Layer
	add := func(open tarball.Opener) error {
		l, err := tarball.LayerFromOpener(open,
			tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(o.level), tarball.WithCompressedCaching)
		layers = append(layers, l)
		return err
	}
	if o.base != "" {
		if err := add(func() (io.ReadCloser, error) { return os.Open(o.base) }); err != nil {
			return nil, err
		}
	}
	own, err := o.layer()
	if err != nil {
		return nil, err
	}
	if err := add(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(own)), nil }); err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if img, err = mutate.AppendLayers(img, layers...); err != nil {
		return nil, err
	}
	c, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	c = c.DeepCopy()
	c.OS, c.Architecture, c.Created = "linux", o.arches[0], v1.Time{Time: o.created}
	c.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	c.Config.Entrypoint = o.entrypoint
	for i := range c.History {
		c.History[i] = v1.History{Created: c.Created, CreatedBy: "crust-csi deploy/image"}
	}
	return mutate.ConfigFile(img, c)
}

// layer is an archive of the entries and of the directories that lead to them.
func (o options) layer() ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	made := map[string]bool{}
	header := func(name string, h tar.Header) error {
		var dirs []string
		for d := path.Dir(name); d != "." && d != "/" && !made[d]; d = path.Dir(d) {
			made[d] = true
			dirs = append(dirs, d)
		}
		// The base may have links in their places (/bin), which stay links then.
		if o.base == "" {
			slices.Reverse(dirs)
			for _, d := range dirs {
				mode := int64(0o755)
				if d == "tmp" {
					mode = 0o1777
				}
				if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d + "/", Mode: mode, ModTime: o.created}); err != nil {
					return err
				}
			}
		}
		h.Name, h.ModTime = name, o.created
		return w.WriteHeader(&h)
	}
	slices.Sort(o.entries)
	for _, e := range o.entries {
		if link, target, ok := strings.Cut(e, "->"); ok {
			h := tar.Header{Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}
			if err := header(strings.TrimPrefix(link, "/"), h); err != nil {
				return nil, err
			}
			continue
		}
		source, to, ok := strings.Cut(e, "=")
		if !ok || !path.IsAbs(to) {
			return nil, fmt.Errorf("%q: give SOURCE=/PATH[=MODE] or /LINK->TARGET", e)
		}
		mode := int64(0o755)
		if p, m, ok := strings.Cut(to, "="); ok {
			var err error
			if mode, err = strconv.ParseInt(m, 8, 64); err != nil {
				return nil, fmt.Errorf("%q: %w", e, err)
			}
			to = p
		}
		content, err := os.ReadFile(source)
		if err != nil {
			return nil, err
		}
		h := tar.Header{Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(content))}
		if err := header(strings.TrimPrefix(to, "/"), h); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}
