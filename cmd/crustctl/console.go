package main

import (
	"io"
	"os"
	"strings"
)

// lastWords returns the end of a guest's console, for an error. The guest may have written any
// amount.
func lastWords(console string) string {
	f, err := os.Open(console)
	if err != nil {
		return ""
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return ""
	}
	const lines, bytes = 15, 8 << 10
	b, err := io.ReadAll(io.NewSectionReader(f, max(0, size-bytes), bytes))
	if err != nil || len(b) == 0 {
		return ""
	}
	said := strings.Split(strings.TrimSpace(strings.ReplaceAll(string(b), "\r", "")), "\n")
	return "\nthe guest's console ends with:\n  " + strings.Join(said[max(0, len(said)-lines):], "\n  ")
}
