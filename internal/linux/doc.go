// Package linux contains every raw system call of the project, each under the name of the call it
// makes. No other package may import golang.org/x/sys/unix or syscall (the linter enforces it).
//
// Descriptors are *os.File so that the garbage collector closes a forgotten one, and use after
// close is an error instead of an access to another file. EINTR is retried here and nowhere else.
// Errors are *os.PathError or *os.SyscallError around the errno, so errors.Is(err, linux.EBUSY)
// works.
package linux
