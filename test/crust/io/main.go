// Command io measures how fast directories take data, for TestSpeed. A container runs it, on the directories that it is given. It prints a
// line for each measurement: what, directory, nanoseconds.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

const rounds = 3

func main() {
	content, err := files(10_000)
	must(err)
	const archive = "/dev/shm/archive"
	must(os.WriteFile(archive, content, 0o600))
	for range rounds {
		for _, dir := range os.Args[1:] {
			f, err := lay(filepath.Join(dir, "f"))
			must(err)
			for _, m := range []struct {
				what string
				do   func(dir string) error
			}{
				{"fsync", func(string) error { return randomWrites(f) }}, {"sequential", sequentialWrites},
				{"untar", func(dir string) error { return untar(archive, dir) }},
			} {
				at := filepath.Join(dir, m.what)
				must(os.Mkdir(at, 0o755))
				begin := time.Now()
				must(m.do(at))
				fmt.Println(m.what, dir, time.Since(begin).Nanoseconds())
				must(os.RemoveAll(at))
			}
			must(f.Close())
		}
	}
}

func must(err error) {
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

// randomWrites writes 4 KiB at a time, somewhere in a file of 16 MiB, and waits for each.
func randomWrites(f *os.File) (err error) {
	const block, count = 4 << 10, 100
	places, b := rand.New(rand.NewSource(1)), make([]byte, block)
	for range count {
		if _, err := f.WriteAt(b, places.Int63n(size/block)*block); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return nil
}

const size = 16 << 20

// lay makes that file.
func lay(at string) (*os.File, error) {
	f, err := os.Create(at)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(make([]byte, size))
	return f, errors.Join(err, f.Sync())
}

// sequentialWrites writes 64 times 1 MiB, and waits at the end.
func sequentialWrites(dir string) (err error) {
	const count = 64
	f, err := os.Create(filepath.Join(dir, "f"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b := make([]byte, 1<<20)
	for range count {
		if _, err := f.Write(b); err != nil {
			return err
		}
	}
	return f.Sync()
}

// files makes an archive of small files, a hundred in each directory.
func files(count int) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range count {
		if i%100 == 0 {
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprint(i / 100), Mode: 0o755}); err != nil {
				return nil, err
			}
		}
		const length = 500
		h := &tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%d/%d", i/100, i), Size: length, Mode: 0o644}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(make([]byte, length)); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}

// untar unpacks the archive by busybox, as a container's own program would.
func untar(archive, dir string) error {
	out, err := exec.Command("/bin/busybox", "tar", "xf", archive, "-C", dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("tar: %w: %s", err, out)
	}
	return nil
}
