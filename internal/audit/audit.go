// Package audit keeps the log of what was done to volumes: one JSON object per line, in a file that
// survives restarts and is rotated by size. A line contains only named facts, never the text of a
// request or an error, so that no secret can reach it.
package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// FileName is the name of the log in the state directory. Older parts have a number before the
// extension: audit.1.jsonl is the newest of them.
const FileName = "audit.jsonl"

const (
	maxFile = 8 << 20 // bytes of one part
	kept    = 4       // older parts
)

// Action is what was done.
type Action string

// The actions. "Given" is a publish, "taken" an unpublish; "deferred" hands the volume to a sandbox
// that mounts it itself (KEP-2857). "Writes-lost" means that data written by a pod could not be
// written to the volume's disk.
const (
	Created         Action = "created"
	Deleted         Action = "deleted"
	Formatted       Action = "formatted"
	Checked         Action = "checked"
	Grown           Action = "grown"
	Staged          Action = "staged"
	Unstaged        Action = "unstaged"
	Given           Action = "given"
	Taken           Action = "taken"
	Deferred        Action = "deferred"
	WritesLost      Action = "writes-lost"
	SnapshotMade    Action = "snapshot-created"
	SnapshotDeleted Action = "snapshot-deleted"
)

// Outcome is the result of an action.
type Outcome string

// Begun is written before an action that cannot be undone, so that a crash in the middle leaves a
// line.
const (
	Begun  Outcome = "begun"
	Done   Outcome = "done"
	Failed Outcome = "failed"
)

// Caller identifies the requester: a process on the driver's socket, and its call.
type Caller struct {
	Method    string `json:"method,omitempty"`
	RequestID uint64 `json:"requestID,omitempty"` // as in the driver's log
	PID       int32  `json:"pid,omitempty"`
	UID       *int64 `json:"uid,omitempty"`
}

// Event is one line.
type Event struct {
	Time    time.Time `json:"time"`
	Action  Action    `json:"action"`
	Outcome Outcome   `json:"outcome"`
	Code    string    `json:"code,omitempty"` // the kind of error, if the action failed

	Volume   string `json:"volume,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	Name     string `json:"name,omitempty"`   // as the orchestrator calls it
	Source   string `json:"source,omitempty"` // the source of a copy
	Device   string `json:"device,omitempty"`
	FSType   string `json:"fsType,omitempty"`
	Bytes    int64  `json:"bytes,omitempty"`
	Target   string `json:"target,omitempty"`
	Access   string `json:"access,omitempty"` // block or mount, plus "read-only" if it is
	Result   string `json:"result,omitempty"` // of a check
	Pod      string `json:"pod,omitempty"`    // namespace/name, if the orchestrator provides it
	PodUID   string `json:"podUID,omitempty"`
	Claim    string `json:"claim,omitempty"` // namespace/name

	Caller
}

// Log appends to the file. A nil Log drops everything.
type Log struct {
	path string
	most int64

	mu    sync.Mutex
	file  *os.File
	size  int64
	stuck bool // the last attempt to rotate failed
	torn  bool // the last line has no end
}

// Open opens the log in a directory, which must exist.
func Open(dir string) (*Log, error) {
	l := &Log{path: filepath.Join(dir, FileName), most: maxFile}
	if err := l.open(); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *Log) open() error {
	f, err := os.OpenFile(l.path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.file, l.size = f, st.Size()
	if l.size == 0 {
		return nil
	}
	// A machine crash or a full disk may have torn the last line. The next event ends it: a disk that is still full must not prevent the
	// start.
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, l.size-1); err != nil {
		return errors.Join(err, f.Close())
	}
	l.torn = last[0] != '\n'
	return nil
}

// Write appends an event, with the time and the caller from ctx. When Write returns, the line is in
// the kernel; for an action that cannot be undone it is also on disk.
func (l *Log) Write(ctx context.Context, e Event) error {
	if l == nil {
		return nil
	}
	e.Time = time.Now().UTC()
	if c, ok := ctx.Value(callerKey{}).(Caller); ok {
		e.Caller = c
	}
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	b = append(b, '\n')
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return fmt.Errorf("audit log %s is closed", l.path)
	}
	var rotated error
	if l.size > 0 && l.size+int64(len(b)) > l.most {
		rotated = l.rotate() // an oversized log is better than a lost line; the next event tries again
	}
	if l.torn { // do not append to that line
		b = append([]byte{'\n'}, b...)
	}
	n, err := l.file.Write(b)
	l.size += int64(n)
	if n > 0 { // a full disk tears the line
		l.torn = b[n-1] != '\n'
	}
	if err != nil {
		return err
	}
	if e.Outcome == Begun {
		if err := l.file.Sync(); err != nil {
			return err
		}
	}
	said := l.stuck
	if l.stuck = rotated != nil; l.stuck && !said {
		return fmt.Errorf("%w, and grows until it can be: %w", ErrNotRotated, rotated)
	}
	return nil
}

// ErrNotRotated is in the error chain of Write if the line was written, and a new part could not be made. Of several such calls in a row,
// the first returns it.
var ErrNotRotated = errors.New("the audit log cannot be rotated")

// rotate starts a new file. If a step fails, the present file continues, and each part stays until a later attempt succeeds.
func (l *Log) rotate() error {
	next, err := os.OpenFile(l.path+".next", os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	if err := l.shift(next.Name()); err != nil {
		return errors.Join(err, next.Close())
	}
	old := l.file
	l.file, l.size, l.torn = next, 0, false
	return old.Close()
}

// shift makes each part the next older one, and the file with that name the present one.
func (l *Log) shift(next string) error {
	// If an earlier attempt failed, it has left a gap. Parts older than the gap stay where they are.
	gap := 1
	for ; gap < kept; gap++ {
		if _, err := os.Lstat(l.part(gap)); errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	for i := gap - 1; i >= 0; i-- {
		if err := os.Rename(l.part(i), l.part(i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(next, l.path); err != nil {
		return errors.Join(err, os.Rename(l.part(1), l.path)) // the present file keeps its name
	}
	return nil
}

// part returns the path of an older part; part 0 is the present one.
func (l *Log) part(i int) string { return partPath(filepath.Dir(l.path), i) }

func partPath(dir string, i int) string {
	if i == 0 {
		return filepath.Join(dir, FileName)
	}
	return filepath.Join(dir, fmt.Sprintf("audit.%d.jsonl", i))
}

// Close ends the log; later events are refused.
func (l *Log) Close() error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.file
	l.file = nil
	if f == nil {
		return nil
	}
	return f.Close()
}

// Read returns the events still in dir's log, oldest first, and the number of lines that are not
// events: a machine crash may tear the last line of a part.
func Read(dir string) (events []Event, torn int, err error) {
	parts, err := openParts(dir)
	if err != nil {
		return nil, 0, err
	}
	defer closeAll(parts)
	for _, f := range parts {
		st, err := f.Stat()
		if err != nil {
			return nil, 0, err
		}
		b, err := io.ReadAll(io.LimitReader(f, st.Size())) // a file that keeps growing is not read for ever
		if err != nil {
			return nil, 0, err
		}
		for line := range bytes.Lines(b) {
			line = bytes.TrimSpace(line)
			if len(line) == 0 {
				continue
			}
			var e Event
			if json.Unmarshal(line, &e) != nil || e.Action == "" || e.Time.IsZero() {
				torn++
				continue
			}
			events = append(events, e)
		}
	}
	return events, torn, nil
}

// openParts opens all parts, oldest first. A concurrent rotation may hide some, so it checks that
// each path still names the opened file, and otherwise starts again.
func openParts(dir string) ([]*os.File, error) {
	for {
		var opened [kept + 1]*os.File
		var parts []*os.File
		for i := kept; i >= 0; i-- {
			f, err := os.Open(partPath(dir, i))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				closeAll(parts)
				return nil, err
			}
			opened[i], parts = f, append(parts, f)
		}
		still, err := stillThere(dir, opened[:])
		if still {
			return parts, nil
		}
		closeAll(parts)
		if err != nil {
			return nil, err
		}
	}
}

func stillThere(dir string, opened []*os.File) (bool, error) {
	for i, f := range opened {
		now, err := os.Stat(partPath(dir, i))
		if errors.Is(err, fs.ErrNotExist) {
			if f != nil {
				return false, nil
			}
			continue
		}
		if err != nil || f == nil {
			return false, err
		}
		then, err := f.Stat()
		if err != nil || !os.SameFile(now, then) {
			return false, err
		}
	}
	return true, nil
}

func closeAll(parts []*os.File) {
	for _, f := range parts {
		f.Close()
	}
}

type callerKey struct{}

// WithCaller returns a context whose events name the caller.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}
