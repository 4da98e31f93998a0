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

// The kinds, with the gRPC codes that faultgrpc gives them.
const (
	Internal    Kind = iota // something unexpected failed (INTERNAL)
	Invalid                 // the request makes no sense (INVALID_ARGUMENT)
	NotFound                // what was named does not exist (NOT_FOUND)
	Exists                  // it exists, and differs from what was asked (ALREADY_EXISTS)
	State                   // the state of the volume or node forbids it (FAILED_PRECONDITION)
	NoSpace                 // the pool cannot hold it (RESOURCE_EXHAUSTED)
	OutOfRange              // a size that cannot be had (OUT_OF_RANGE)
	Busy                    // another operation on it is running (ABORTED)
	Unavailable             // what it needs is away, and may come (UNAVAILABLE)
	Elsewhere               // another node has to do it (RESOURCE_EXHAUSTED)
)

func (k Kind) String() string {
	names := [...]string{"Internal", "Invalid", "NotFound", "Exists", "State", "NoSpace", "OutOfRange", "Busy", "Unavailable", "Elsewhere"}
	if k < 0 || int(k) >= len(names) {
		return fmt.Sprintf("Kind(%d)", int(k))
	}
	return names[k]
}

type fault struct {
	kind    Kind
	err     error
	details []string
}

func (f *fault) Error() string { return f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

// Private is a piece of an error's text that has two sides: what everybody may
// read who sees the error (events are read by whoever may read the claim), and
// what only the log of this program says, such as paths of other people's pods.
type Private struct {
	Public string
	Detail string
}

// String is the public side.
func (p Private) String() string { return p.Public }

// New makes an error of a kind; the format is fmt.Errorf's, %w included. Of an
// argument that is Private the text has the public side, and Details the other.
func New(kind Kind, format string, args ...any) error {
	f := &fault{kind: kind, err: fmt.Errorf(format, args...)}
	for _, a := range args {
		if p, ok := a.(Private); ok && p.Detail != "" {
			f.details = append(f.details, p.Detail)
		}
	}
	return f
}

// Details are what an error's text does not say and the log should: the private
// sides of all errors in its tree.
func Details(err error) []string {
	var all []string
	if f, ok := err.(*fault); ok {
		all = append(all, f.details...)
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		all = append(all, Details(e.Unwrap())...)
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			all = append(all, Details(one)...)
		}
	}
	return all
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
