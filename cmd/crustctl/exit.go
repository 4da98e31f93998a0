package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// A command that searches for something reports the result in its exit code, as grep does: 0
// nothing found, 1 something found, 2 the search failed.
const (
	foundSomething = 1
	couldNotLook   = 2
)

// looks is the annotation of such a command.
const looks = "looks"

// found is the error of a command that found something and has printed it.
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
