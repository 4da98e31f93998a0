package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func write(t *testing.T, l *Log, volume string) {
	t.Helper()
	if err := l.Write(context.Background(), Event{Action: Created, Outcome: Done, Volume: volume}); err != nil {
		t.Fatal(err)
	}
}

func volumes(t *testing.T, dir string) (names []string, torn int) {
	t.Helper()
	events, torn, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		names = append(names, e.Volume)
	}
	return names, torn
}

func TestAudit_ALineThatACrashToreCostsOnlyItself(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	write(t, l, "a")
	write(t, l, "b")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, FileName)
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, st.Size()-5); err != nil {
		t.Fatal(err)
	}
	if l, err = Open(dir); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	write(t, l, "c")
	names, torn := volumes(t, dir)
	if fmt.Sprint(names) != "[a c]" || torn != 1 {
		t.Errorf("read %v and %d torn lines; want [a c] and 1", names, torn)
	}
}

func TestAudit_RotationKeepsTheNewestAndTheirOrder(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.most = 1000
	const n = 200
	for i := range n {
		write(t, l, fmt.Sprintf("v%03d", i))
	}
	parts, err := filepath.Glob(filepath.Join(dir, "audit*"))
	if err != nil || len(parts) != kept+1 {
		t.Errorf("%d parts (%v), %v; want %d", len(parts), parts, err, kept+1)
	}
	for _, p := range parts {
		st, err := os.Stat(p)
		if err != nil || st.Size() > l.most || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v; want at most %d bytes and mode 0600", p, st, err, l.most)
		}
	}
	names, torn := volumes(t, dir)
	if torn != 0 || len(names) < 20 {
		t.Fatalf("%d events, %d torn", len(names), torn)
	}
	for i, name := range names {
		if want := fmt.Sprintf("v%03d", n-len(names)+i); name != want {
			t.Fatalf("event %d of %d is %s; want %s", i, len(names), name, want)
		}
	}
}

// A reader during rotation misses no event between the first and the last that it returns, and sees
// none twice.
func TestAudit_ReadingWhileItIsRotated(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.most = 20000
	written := make(chan struct{})
	go func() {
		defer close(written)
		for i := range 30000 {
			if err := l.Write(context.Background(), Event{Action: Created, Outcome: Done, Bytes: int64(i)}); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for over := false; !over; {
		select {
		case <-written:
			over = true
		default:
		}
		events, _, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		for i := 1; i < len(events); i++ {
			if a, b := events[i-1].Bytes, events[i].Bytes; b != a+1 {
				t.Fatalf("event %d follows event %d", b, a)
			}
		}
	}
}

func TestAudit_TheCallerIsNamed(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	uid := int64(0)
	ctx := WithCaller(context.Background(), Caller{Method: "DeleteVolume", RequestID: 7, PID: 42, UID: &uid})
	if err := l.Write(ctx, Event{Action: Deleted, Outcome: Begun, Volume: "v"}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, FileName))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"action":"deleted"`, `"outcome":"begun"`, `"volume":"v"`, `"method":"DeleteVolume"`, `"requestID":7`,
		`"pid":42`, `"uid":0`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("the line lacks %s: %s", want, b)
		}
	}
	if strings.Count(string(b), "\n") != 1 {
		t.Errorf("not one line: %q", b)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"time":"2026-01-01T00:00:00Z","action":"created","outcome":"done"}` + "\n{"))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, FileName), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Read(dir); err != nil {
			t.Fatal(err)
		}
	})
}

// A part that grew beyond its limit, because it could not be rotated, is read as a whole.
func TestAudit_APartThatCouldNotBeRotatedIsReadWhole(t *testing.T) {
	dir := t.TempDir()
	line := `{"time":"2026-01-01T00:00:00Z","action":"created","outcome":"done","volume":"` + strings.Repeat("v", 1000) + `"}` + "\n"
	count := 3 * maxFile / len(line)
	if err := os.WriteFile(partPath(dir, 0), []byte(strings.Repeat(line, count)), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, torn := volumes(t, dir); len(got) != count || torn > 0 {
		t.Errorf("%d lines of %d, %d torn", len(got), count, torn)
	}
}

// A new part that cannot be made, as on a disk without room for it, costs no line, old or new.
func TestAudit_ARotationThatFailsLosesNothing(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.most = 2000
	var want []string
	add := func(n int) (told int) {
		t.Helper()
		for range n {
			name := fmt.Sprintf("v%d", len(want))
			err := l.Write(context.Background(), Event{Action: Created, Outcome: Done, Volume: name})
			switch {
			case errors.Is(err, ErrNotRotated):
				told++
			case err != nil:
				t.Fatal(err)
			}
			want = append(want, name)
		}
		return told
	}
	check := func(when string) {
		t.Helper()
		got, torn := volumes(t, dir)
		if torn > 0 || !slices.Equal(got, want) {
			t.Errorf("%s: %d lines of %d, %d torn: %q", when, len(got), len(want), torn, got)
		}
	}
	add(65) // all parts but the oldest
	if _, err := os.Lstat(l.part(kept - 1)); err != nil {
		t.Fatal(err)
	}
	check("before")
	for _, at := range []string{l.path + ".next", l.part(kept)} { // no file can be made, no part can be moved
		what := filepath.Base(at)
		away := filepath.Join(dir, "away")
		_ = os.Rename(at, away) // if it is there
		if err := os.MkdirAll(at+"/x", 0o700); err != nil {
			t.Fatal(err)
		}
		if told := add(30); told != 1 {
			t.Errorf("%s: told %d times", what, told)
		}
		if err := os.RemoveAll(at); err != nil {
			t.Fatal(err)
		}
		_ = os.Rename(away, at) // the same
		check(what)
		if told := add(1); told != 0 {
			t.Errorf("afterwards: told %d times", told)
		}
	}
	add(5)
	// By now the oldest part is gone, as it should be.
	if got, torn := volumes(t, dir); torn > 0 || len(got) < 100 || !slices.Equal(got, want[len(want)-len(got):]) {
		t.Errorf("afterwards: %d lines of %d, %d torn: %q", len(got), len(want), torn, got)
	}
	if l.size > l.most {
		t.Errorf("the log is not rotated any more: %d bytes", l.size)
	}

	// Half of an attempt failed: the part that was not moved is not there. No part is lost for it.
	if err := os.Rename(l.part(1), l.part(1)+"-away"); err != nil {
		t.Fatal(err)
	}
	oldest, err := os.ReadFile(l.part(2))
	if err != nil {
		t.Fatal(err)
	}
	add(20)
	if again, err := os.ReadFile(l.part(2)); err != nil || !bytes.Equal(again, oldest) {
		t.Errorf("a part behind a gap was moved: %v", err)
	}
}
