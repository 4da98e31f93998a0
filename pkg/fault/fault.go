// Package fault gives an error its kind: what sort of refusal it is, so that
// whoever speaks to the outside (a CSI server, a command) can choose a status
// code without reading the text. The text is for people: it names the volume,
// what was asked, what is there, and the way out.
package fault

import (
	"errors"
	"fmt"
)

// Kind is the sort of refusal.
type Kind int

// The kinds, with the gRPC code that pkg/driver gives them.
const (
	Internal   Kind = iota // something unexpected failed (INTERNAL)
	Invalid                // the request makes no sense (INVALID_ARGUMENT)
	NotFound               // what was named does not exist (NOT_FOUND)
	Exists                 // it exists, and differs from what was asked (ALREADY_EXISTS)
	State                  // the state of the volume or node forbids it (FAILED_PRECONDITION)
	NoSpace                // the pool cannot hold it (RESOURCE_EXHAUSTED)
	OutOfRange             // a size that cannot be had (OUT_OF_RANGE)
	Busy                   // another operation on it is running (ABORTED)
)

func (k Kind) String() string {
	names := [...]string{"Internal", "Invalid", "NotFound", "Exists", "State", "NoSpace", "OutOfRange", "Busy"}
	if k < 0 || int(k) >= len(names) {
		return fmt.Sprintf("Kind(%d)", int(k))
	}
	return names[k]
}

type fault struct {
	kind Kind
	err  error
}

func (f *fault) Error() string { return f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

// New makes an error of a kind; the format is fmt.Errorf's, %w included.
func New(kind Kind, format string, args ...any) error {
	return &fault{kind, fmt.Errorf(format, args...)}
}

// KindOf tells an error's kind: that of the outermost fault in its chain, and
// Internal for an error that has none.
func KindOf(err error) Kind {
	var f *fault
	if errors.As(err, &f) {
		return f.kind
	}
	return Internal
}

// Is tells whether err is a fault of that kind.
func Is(err error, kind Kind) bool {
	var f *fault
	return errors.As(err, &f) && f.kind == kind
}
