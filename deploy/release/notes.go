package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
)

// notes takes the release's section out of the CHANGELOG.
func (r release) notes() error {
	content, err := os.ReadFile(filepath.Join(r.project, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	section, err := section(content, r.tag())
	if err != nil {
		return err
	}
	return r.write("NOTES.md", section)
}

var heading = regexp.MustCompile(`(?m)^## .*$`)

func section(changes []byte, tag string) ([]byte, error) {
	ends := append(heading.FindAllIndex(changes, -1), []int{len(changes)})
	for i, at := range ends[:len(ends)-1] {
		title := changes[at[0]:at[1]]
		if !bytes.HasPrefix(title, []byte("## "+tag+" - ")) {
			continue
		}
		body := bytes.TrimSpace(changes[at[1]:ends[i+1][0]])
		if len(body) == 0 {
			return nil, fmt.Errorf("CHANGELOG.md: the section of %s is empty", tag)
		}
		return fmt.Appendf(nil, "# Crust CSI %s\n\n%s\n", title[len("## "):], body), nil
	}
	return nil, fmt.Errorf("CHANGELOG.md has no section \"## %s - DATE\"", tag)
}

// sums writes the checksums of all files, as sha256sum -c reads them.
func (r release) sums() error {
	found, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	for _, f := range found {
		content, err := os.ReadFile(filepath.Join(r.out, f.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(content), f.Name())
	}
	return r.write("SHA256SUMS", b.Bytes())
}
