package testnode

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Failpoints controls the failpoints of a running process that was built with the tag "failpoint"
// and has Env in its environment (see internal/failpoint).
type Failpoints struct{ file string }

// NewFailpoints keeps its file in a directory of the test.
func NewFailpoints(t testing.TB) Failpoints {
	t.Helper()
	return Failpoints{filepath.Join(t.TempDir(), "failpoint")}
}

// Env returns the variables that the process needs in its environment.
func (f Failpoints) Env() []string { return []string{"CRUST_FAILPOINT_FILE=" + f.file} }

// Set makes one point do something: "error", "hang" or "kill".
func (f Failpoints) Set(t testing.TB, point, mode string) {
	t.Helper()
	if err := os.Remove(f.mark()); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	f.write(t, point+" "+mode)
}

// Off deactivates all points; calls that hang continue.
func (f Failpoints) Off(t testing.TB) { t.Helper(); f.write(t, "none") }

// Reached reports whether the last point given to Set was reached.
func (f Failpoints) Reached() bool {
	_, err := os.Stat(f.mark())
	return err == nil
}

func (f Failpoints) mark() string { return f.file + ".hit" }

func (f Failpoints) write(t testing.TB, text string) {
	t.Helper()
	if err := os.WriteFile(f.file+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(f.file+".new", f.file); err != nil {
		t.Fatal(err)
	}
}

// Hang makes a point hang, runs calls, and waits until they hang there or have ended. Calls that
// hang end when the point is Off.
func (f Failpoints) Hang(t testing.TB, point string, calls func() error) (hung bool, ended <-chan error) {
	t.Helper()
	f.Set(t, point, "hang")
	end := make(chan error, 1)
	go func() {
		err := errors.New("the calls ended their goroutine: see the failure above")
		defer func() { end <- err }()
		err = calls()
	}()
	for {
		select {
		case err := <-end:
			end <- err
			return false, end
		case <-time.After(5 * time.Millisecond):
			if f.Reached() {
				return true, end
			}
		}
	}
}
