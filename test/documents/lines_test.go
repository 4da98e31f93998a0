package documents

import (
	"bytes"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// eachGoFile calls f with each Go file that is not generated. The path is relative to the project.
func eachGoFile(t *testing.T, f func(path string, text []byte)) {
	t.Helper()
	seen := 0
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != "../.." {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, ".pb.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		seen++
		f(strings.TrimPrefix(path, "../../"), text)
		return nil
	})
	if err != nil || seen < 300 {
		t.Errorf("%d files, %v", seen, err)
	}
}

// A longer file has more than one subject.
func TestNoGoFileHasMoreThan400Lines(t *testing.T) {
	eachGoFile(t, func(path string, text []byte) {
		if lines := bytes.Count(text, []byte("\n")); lines > 400 {
			t.Errorf("%s has %d lines", path, lines)
		}
	})
}

// Lines of Go end by column 140, with four columns for a tab. A line with a string literal of 60 characters or more may
// be longer: a message that is split cannot be found by its text. So may one that test/mutants/list quotes.
func TestGoEndsByColumn140(t *testing.T) {
	const most, long = 140, 60
	lists, err := filepath.Glob("../mutants/list/*.txt")
	if err != nil || len(lists) == 0 {
		t.Fatalf("%v, %v", lists, err)
	}
	var quoted []byte
	for _, path := range lists {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		quoted = append(quoted, b...)
	}
	eachGoFile(t, func(path string, text []byte) {
		literal := linesOfLiterals(text, long)
		for i, line := range strings.Split(string(text), "\n") {
			n := len([]rune(strings.ReplaceAll(line, "\t", "    ")))
			if n > most && !literal[i+1] && !bytes.Contains(quoted, []byte(strings.TrimSpace(line))) {
				t.Errorf("%s:%d ends at column %d", path, i+1, n)
			}
		}
	})
}

// linesOfLiterals returns the lines that a string literal of at least this length touches.
func linesOfLiterals(text []byte, long int) map[int]bool {
	lines := map[int]bool{}
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, 0)
	for {
		pos, kind, word := s.Scan()
		if kind == token.EOF {
			return lines
		}
		if kind == token.STRING && len(word) >= long {
			first := file.Line(pos)
			for line := first; line <= first+strings.Count(word, "\n"); line++ {
				lines[line] = true
			}
		}
	}
}
