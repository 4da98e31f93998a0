// Package nodelabels reads and writes the file with the labels of a program's node. Its lines are
// those of a downward-API volume: key="value".
package nodelabels

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// maxSize is more than an object of Kubernetes can have.
const maxSize = 1 << 20

// Read reads the file.
func Read(path string) (map[string]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, err
	}
	labels, err := Parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return labels, nil
}

// Parse reads the text of such a file.
func Parse(b []byte) (map[string]string, error) {
	if len(b) > maxSize {
		return nil, fmt.Errorf("the file is larger than %d bytes", maxSize)
	}
	labels := map[string]string{}
	n := 0
	for line := range bytes.Lines(b) {
		n++
		text := strings.TrimSuffix(string(line), "\n")
		if text == "" {
			continue
		}
		key, value, err := parseLine(text)
		if err == nil {
			if _, twice := labels[key]; twice {
				err = fmt.Errorf("the label %s is there twice", key)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		labels[key] = value
	}
	// Every Kubernetes node has labels. A file without any is truncated.
	if len(labels) == 0 {
		return nil, errors.New(`the file has no labels; each line is a label: key="value"`)
	}
	return labels, nil
}

func parseLine(text string) (key, value string, err error) {
	key, quoted, ok := strings.Cut(text, "=")
	if ok && strings.HasPrefix(quoted, `"`) {
		value, err = strconv.Unquote(quoted)
	}
	if !ok || !strings.HasPrefix(quoted, `"`) || err != nil {
		return "", "", fmt.Errorf(`%q is no label: write key="value"`, text)
	}
	return key, value, check(key, value)
}

func check(key, value string) error {
	if wrong := validation.IsQualifiedName(key); len(wrong) > 0 {
		return fmt.Errorf("the label's key %q: %s", key, strings.Join(wrong, "; "))
	}
	if wrong := validation.IsValidLabelValue(value); len(wrong) > 0 {
		return fmt.Errorf("the value %q of label %s: %s", value, key, strings.Join(wrong, "; "))
	}
	return nil
}

// Format returns the text of the file.
func Format(labels map[string]string) []byte {
	var b bytes.Buffer
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		fmt.Fprintf(&b, "%s=%q\n", key, labels[key])
	}
	return b.Bytes()
}

// Write replaces the file atomically.
func Write(path string, labels map[string]string) error {
	text := Format(labels)
	if _, err := Parse(text); err != nil {
		return fmt.Errorf("these labels cannot be written: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // fails after the rename, when the name is gone
	defer f.Close()
	if _, err := f.Write(text); err != nil {
		return err
	}
	// Another user reads it; labels are not secret.
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
