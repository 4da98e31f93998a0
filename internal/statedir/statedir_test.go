package statedir

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestA11_OneProcessAtATime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "by", "it")
	first, err := Lock(dir, "first")
	if err != nil {
		t.Fatal(err)
	}
	second, err := Lock(dir, "second")
	if err == nil {
		second.Close()
		t.Fatal("two have it")
	}
	for _, want := range []string{dir, "first", fmt.Sprint(os.Getpid()), "stop that one"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, err)
		}
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	third, err := Lock(dir, "third")
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	third.Close()
}
