package main

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// A guest can write any amount to its console.
func TestLastWordsOfAGuestThatSaidALot(t *testing.T) {
	console := filepath.Join(t.TempDir(), "console")
	f, err := os.Create(console)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const size = 256 << 20
	if _, err := f.WriteAt([]byte("\r\nKernel panic: \x1b[2Jno init\r\n"), size); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	said := lastWords(console)
	runtime.ReadMemStats(&after)
	if !strings.HasSuffix(said, "Kernel panic: \x1b[2Jno init") {
		t.Errorf("%.100q", said[max(0, len(said)-100):])
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 4<<20 {
		t.Errorf("%d bytes were taken for a console of %d", used, size)
	}
	if said := lastWords(filepath.Join(t.TempDir(), "none")); said != "" {
		t.Errorf("%q", said)
	}
}
