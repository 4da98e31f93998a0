// Package fault gives an error a kind: the sort of refusal it is. A CSI server or a command
// chooses a status code by it, without parsing the text. The text is for people: it names the
// volume, what was requested, what was found, and how to go on.
package fault

import (
	"errors"
	"fmt"
)

// Kind is the sort of refusal.
type Kind int

// The kinds. In parentheses is the gRPC code that package faultgrpc maps each one to.
const (
	Internal    Kind = iota // an unexpected failure (INTERNAL)
	Invalid                 // the request is malformed or contradictory (INVALID_ARGUMENT)
	NotFound                // the named object does not exist (NOT_FOUND)
	Exists                  // the object exists and differs from the request (ALREADY_EXISTS)
	State                   // the state of the volume or node forbids it (FAILED_PRECONDITION)
	NoSpace                 // the pool has no room for it (RESOURCE_EXHAUSTED)
	OutOfRange              // the size is not possible (OUT_OF_RANGE)
	Busy                    // another operation on it is running (ABORTED)
	Unavailable             // a dependency is missing for now and may return (UNAVAILABLE)
	Elsewhere               // another node must do it (RESOURCE_EXHAUSTED)
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

// Private is a part of an error's text that has a public and a private form. Everybody who sees
// the error may read Public (whoever may read the claim can read its events). Only this
// program's log shows Detail, for example paths of other people's pods.
type Private struct {
	Public string
	Detail string
}

// String returns Public.
func (p Private) String() string { return p.Public }

// After returns p with the separator before Public, to be appended to a sentence. An empty p stays
// empty.
func (p Private) After(separator string) Private {
	if p.Public != "" {
		p.Public = separator + p.Public
	}
	return p
}

// New makes an error of a kind. The format is that of fmt.Errorf, including %w. For an argument
// of type Private, the text contains Public, and Details returns Detail.
func New(kind Kind, format string, args ...any) error {
	f := &fault{kind: kind, err: fmt.Errorf(format, args...)}
	for _, a := range args {
		if p, ok := a.(Private); ok && p.Detail != "" {
			f.details = append(f.details, p.Detail)
		}
	}
	return f
}

// Details returns what belongs in the log and is not in the error's text: the Detail of every
// Private in err's tree.
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

// KindOf returns the kind of the outermost fault in err's chain, or Internal if there is none.
func KindOf(err error) Kind {
	var f *fault
	if errors.As(err, &f) {
		return f.kind
	}
	return Internal
}

// Is reports whether the outermost fault in err's chain is of that kind.
func Is(err error, kind Kind) bool {
	var f *fault
	return errors.As(err, &f) && f.kind == kind
}
