package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// A command that looks for something says by its exit code what came of it, as grep
// does: 0 nothing, 1 something, 2 it could not look.
const (
	foundSomething = 1
	couldNotLook   = 2
)

// looks is the annotation of such a command.
const looks = "looks"

// found is the error of a command that found something, which it has printed.
type found int

func (n found) Error() string {
	if n == 1 {
		return "1 finding"
	}
	return fmt.Sprintf("%d findings", int(n))
}

func exitCode(c *cobra.Command, err error) int {
	var f found
	switch {
	case err == nil:
		return 0
	case c.Annotations[looks] == "" || errors.As(err, &f):
		return foundSomething
	}
	return couldNotLook
}
