package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"
)

// entry is a file of an archive.
type entry struct {
	name    string
	mode    int64
	content []byte
}

// pack makes an archive of the entries below the directory top, in their names'
// order. Nothing of this machine or its files' times is in it.
func pack(top string, entries []entry, at time.Time) ([]byte, error) {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	w := tar.NewWriter(z)
	slices.SortFunc(entries, func(a, b entry) int {
		if a.name < b.name {
			return -1
		}
		return 1
	})
	for _, e := range entries {
		h := tar.Header{
			Typeflag: tar.TypeReg, Name: path.Join(top, e.name), Mode: e.mode, Size: int64(len(e.content)), ModTime: at,
			Format: tar.FormatUSTAR,
		}
		if err := w.WriteHeader(&h); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	err = z.Close()
	return b.Bytes(), err
}

// binaries packs those of each architecture, with the licence.
func (r release) binaries() error {
	licence, err := os.ReadFile(filepath.Join(r.project, "LICENSE"))
	if err != nil {
		return err
	}
	for _, arch := range arches {
		entries := []entry{{"LICENSE", 0o644, licence}}
		dir := filepath.Join(r.built, "bin", arch)
		found, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, f := range found {
			content, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if err != nil {
				return err
			}
			entries = append(entries, entry{f.Name(), 0o755, content})
		}
		top := r.name("-linux-" + arch)
		b, err := pack(top, entries, r.time)
		if err != nil {
			return err
		}
		if err := r.write(top+".tar.gz", b); err != nil {
			return err
		}
	}
	return nil
}
