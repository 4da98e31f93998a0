package linux

import "errors"

// Short tells whether an error means that this process, or the machine, lacked something: descriptors or memory. It
// says nothing about what was asked, so it is neither "yes" nor "no".
func Short(err error) bool {
	return errors.Is(err, EMFILE) || errors.Is(err, ENFILE) || errors.Is(err, ENOMEM)
}
