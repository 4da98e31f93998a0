package linux

import "errors"

// Short reports whether an error means that this process, or the machine, ran out of descriptors or
// memory. Such an error says nothing about the object, so it means neither "yes" nor "no".
func Short(err error) bool {
	return errors.Is(err, EMFILE) || errors.Is(err, ENFILE) || errors.Is(err, ENOMEM)
}
