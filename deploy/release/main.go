// Command release writes the files of a release, from the binaries and images that
// scripts/release.sh has built. The same input gives the same bytes.
//
//	release -project DIR -plan [-draft]   prints the version that the sources make, and the time of its files
//	release -version VERSION -project DIR -built DIR -out DIR
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

var (
	arches = []string{"amd64", "arm64"}
	images = []string{"csi-node", "csi-steward", "crustd", "crust-agent"}
	// Those of the chart that a user makes of the sources.
	notReleased = []string{"crustd-vm"}
)

// release is what is made, of what, and to where.
type release struct {
	version string
	project string // the sources
	built   string // bin/ARCHITECTURE, base-ARCHITECTURE.tar, IMAGE.tar
	out     string
	time    time.Time // of all files
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run() error {
	var r release
	var plan, drafts bool
	flag.BoolVar(&plan, "plan", false, "print VERSION SECONDS, and write nothing; it is an error if the sources are no release")
	flag.BoolVar(&drafts, "draft", false, "with -plan: sources that are no release make VERSION"+dev)
	flag.StringVar(&r.version, "version", "", "of the release, without v")
	flag.StringVar(&r.project, "project", "", "directory of the sources")
	flag.StringVar(&r.built, "built", "", "directory of what was built")
	flag.StringVar(&r.out, "out", "", "directory to fill, an empty one")
	flag.Parse()
	if plan {
		version, err := r.plan(drafts)
		if err == nil {
			fmt.Println(version)
		}
		return err
	}
	if r.version == "" || r.project == "" || r.built == "" || r.out == "" {
		return errors.New("give -version, -project, -built and -out")
	}
	epoch, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH: %w; set it to the time that all files are to have", err)
	}
	r.time = time.Unix(epoch, 0).UTC()
	for _, step := range []func() error{r.binaries, r.archives, r.chart, r.manifests, r.notes, r.bom, r.sums} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// name is the name of a file of the release: crust-csi-0.1.0 and more.
func (r release) name(rest string) string { return "crust-csi-" + r.version + rest }

func (r release) tag() string { return "v" + r.version }

// read reads a file of the sources.
func (r release) read(name string) ([]byte, error) {
	return os.ReadFile(filepath.Join(r.project, name))
}

// write writes a file of the release.
func (r release) write(name string, content []byte) error {
	return os.WriteFile(filepath.Join(r.out, name), content, 0o644)
}

// archives copies the images' archives.
func (r release) archives() error {
	for _, image := range images {
		content, err := os.ReadFile(filepath.Join(r.built, image+".tar"))
		if err != nil {
			return err
		}
		if err := r.write(r.name("-image-"+image+".tar"), content); err != nil {
			return err
		}
	}
	return nil
}
